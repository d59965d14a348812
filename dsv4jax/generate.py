"""Generate texts with a checkpoint: python -m dsv4jax.generate FOLDER --prompt "..."

The folder has a config.json, safetensors files and, for text, a tokenizer.json. Without one, prompts are token ids:
``--ids 5,17,3``. Several prompts are a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS
from dsv4jax.model import Caches, Generated, ModelConfig, Sampling, generate, load_model
from dsv4jax.model.generation import caches_for, check_prompts
from dsv4jax.model.text import Text, chat_text
from dsv4jax.weights.stored import LAYER_ACTIVATIONS

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what part of a character decodes to


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dsv4jax.generate", description="Generate texts with a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--ids", action="append", default=[], help="token ids to continue, such as 5,17,3; likewise")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says, and the model answers")
    parser.add_argument("--max-new", type=int, default=256, help="the most tokens to add to each prompt")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the model guesses ahead per pass")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of a text")
    parser.add_argument("--weights", choices=("stored", "bf16", "f32"), default="stored", help="how to hold weights")
    parser.add_argument("--activations", choices=LAYER_ACTIVATIONS, default="bf16", help="inputs of stored weights")
    parser.add_argument("--kv-format", choices=KV_FORMATS, help="format of the cache's rows; default fp8_tile64")
    parser.add_argument("--indexer-format", choices=INDEXER_FORMATS, help="format of indexer keys; default mxfp4")
    parser.add_argument("--json", action="store_true", help="end with a line that is a JSON object of the new tokens")
    args = parser.parse_args(argv)
    if not args.prompt and not args.ids:
        parser.error("give at least one --prompt or --ids")
    if args.chat and not args.prompt:
        parser.error("--chat is for --prompt")
    if args.max_new < 1:
        parser.error(f"--max-new must be at least 1, got {args.max_new}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    """Do what the command's arguments say.

    Raises:
      ValueError, RuntimeError, FileNotFoundError: as ``load_model`` and ``generate``; or a prompt cannot be read.
    """
    cfg = ModelConfig.from_hf(args.checkpoint)
    text = Text(args.checkpoint) if args.prompt or (args.checkpoint / "tokenizer.json").exists() else None
    prompts = [read_ids(ids) for ids in args.ids]
    for prompt in args.prompt:
        assert text is not None
        prompts.append(text.encode(chat_text([("user", prompt)]) if args.chat else prompt))
    check_prompts(prompts, cfg.vocab_size)  # before weights are loaded, which may take minutes
    sampling = Sampling.of(args.temperature, args.top_p, args.seed)
    caches = make_caches(args, cfg, prompts)
    with progress_bar(f"Loading {args.checkpoint.name}") as on_progress:
        params = load_model(args.checkpoint, args.weights, args.activations, on_progress=on_progress)
        jax.block_until_ready(params)
    print("Compiling, which takes minutes for a large model", file=sys.stderr)
    printer = Printer(text, len(prompts), () if args.ignore_eos else params.cfg.stop_tokens)
    result = generate(
        params,
        prompts,
        args.max_new,
        sampling,
        args.drafts,
        stop_tokens=[] if args.ignore_eos else None,
        caches=caches,
        on_progress=printer.on_progress,
    )
    printer.finish(result.tokens)
    print(summary(result))
    if args.json:
        print(json.dumps({"tokens": result.tokens}))


def read_ids(given: str) -> list[int]:
    """Return the ids of "5,17,3". ValueError if it is something else."""
    try:
        return [int(number) for number in given.split(",")]
    except ValueError:
        raise ValueError(f"--ids must be token ids with commas between them, such as 5,17,3; got {given!r}") from None


def make_caches(args: argparse.Namespace, cfg: ModelConfig, prompts: list[list[int]]) -> Caches:
    """Return caches in the formats that the arguments name."""
    formats = {"kv_format": args.kv_format, "indexer_format": args.indexer_format}
    if args.weights == "f32":
        formats = {name: chosen or "f32" for name, chosen in formats.items()}
    formats = {name: chosen for name, chosen in formats.items() if chosen}
    return caches_for(cfg, prompts, args.max_new, args.drafts, **formats)


def summary(result: Generated) -> str:
    """Return a line with the speed, and how many drafts were accepted."""
    count = sum(len(tokens) for tokens in result.tokens)
    line = f"{count} tokens in {result.seconds:.2f} s, {count / result.seconds:.1f} tokens/s"
    if result.drafted:
        line += f"; {result.accepted} of {result.drafted} drafts accepted ({result.accepted / result.drafted:.0%})"
    return line


class Printer:
    """Prints text as it is made: of one prompt piece by piece, of several when all are complete."""

    def __init__(self, text: Text | None, prompts: int, stop_tokens: Sequence[int]) -> None:
        self._text, self._prompts, self._stop_tokens, self._shown = text, prompts, stop_tokens, ""

    def _decode(self, tokens: list[int]) -> str:
        if self._text is None:
            return " ".join(map(str, tokens))
        ended = bool(tokens) and tokens[-1] in self._stop_tokens
        return self._text.decode(tokens[:-1] if ended else tokens)

    @property
    def on_progress(self) -> Callable[[list[list[int]]], None] | None:
        """What ``generate`` is to call; None for several prompts, for which leaving the loop would only cost time."""
        return self._show if self._prompts == 1 else None

    def _show(self, tokens: list[list[int]]) -> None:
        """Print what is new of a single text, but for a character of which only a part is there."""
        made = self._decode(tokens[0]).rstrip(REPLACEMENT)
        print(made[len(self._shown) :], end="", flush=True)
        self._shown = made

    def finish(self, tokens: list[list[int]]) -> None:
        """Print what was not printed yet."""
        if self._prompts == 1:
            print(self._decode(tokens[0])[len(self._shown) :])
            return
        for i, one in enumerate(tokens):
            print(f"[{i}] {self._decode(one)}")


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show the bytes read, if the package rich is installed and someone is looking."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main())
