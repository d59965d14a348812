"""Generate texts with a checkpoint: python -m dsv4jax.generate FOLDER --prompt "..."

The folder has a config.json, safetensors files and, for text, a tokenizer.json. Without one, prompts are token ids:
``--ids 5,17,3``. Several prompts are a batch.

What is made goes to standard output, and all else to standard error; with ``--json`` standard output is JSON alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import jax
from jax.sharding import Mesh

from dsv4jax.cache.shards import DATA, MODEL
from dsv4jax.checks import Named
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS
from dsv4jax.model import Generated, Generator, ModelConfig, Sampling, load_model
from dsv4jax.model.checkpoint.text import Text, chat_text
from dsv4jax.model.generation.prompts import caches_for, read_prompts
from dsv4jax.weights.stored import LAYER_ACTIVATIONS, WEIGHTS

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what part of a character decodes to


class Given(NamedTuple):
    """A prompt on the command line."""

    text: str | None = None
    ids: list[int] | None = None

    @classmethod
    def of_ids(cls, given: str) -> Given:
        try:
            return cls(ids=[int(number) for number in given.split(",")])
        except ValueError:
            sentence = f"must be token ids with commas between them, such as 5,17,3; got {given!r}"
            raise argparse.ArgumentTypeError(sentence) from None

    def read(self, text: Text | None, chat: bool, bos: bool | None) -> list[int]:
        """Return token ids. ``bos`` None does what the tokenizer does; a chat has such a token of its own."""
        if self.ids is not None:
            return self.ids
        assert text is not None
        assert self.text is not None
        if chat:
            return text.encode(chat_text([("user", self.text)]))
        return text.encode(self.text, bos=text.adds_bos if bos is None else bos)


def mesh_of(given: str) -> Mesh:
    """Read a mesh such as 1x2. Its devices are the first ones that JAX finds."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", given)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be shards of requests x devices of each, such as 1x2; got {given!r}")
    data, model = map(int, match.groups())
    devices = jax.devices()
    if data * model > len(devices):
        raise argparse.ArgumentTypeError(f"{given} takes {data * model} devices, and there are {len(devices)}")
    return jax.make_mesh((data, model), (DATA, MODEL), devices=devices[: data * model])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dsv4jax.generate", description="Generate texts with a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and safetensors files")
    prompt = {"dest": "prompts", "action": "append", "default": []}
    parser.add_argument("--prompt", type=Given, help="text to continue; may be given several times", **prompt)
    parser.add_argument("--ids", type=Given.of_ids, help="token ids to continue, such as 5,17,3; likewise", **prompt)
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says, and the model answers")
    parser.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin texts with the token that begins a text; by default as tokenizer_config.json has it",
    )
    parser.add_argument("--max-new", type=int, default=256, help="the most tokens to add to each prompt")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the model guesses ahead per pass")
    least = "do not judge the first draft that the model trusts less, in [0, 1], nor those after it"
    parser.add_argument("--least-confidence", type=float, default=0.0, help=least)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of a text")
    parser.add_argument("--weights", choices=WEIGHTS, default="stored", help="how to hold weights")
    parser.add_argument("--activations", choices=LAYER_ACTIVATIONS, default="bf16", help="inputs of stored weights")
    moved = "layers, from the first on, whose routed experts stay in the host's memory; for a model larger than a GPU"
    parser.add_argument("--host-experts", type=int, default=0, metavar="LAYERS", help=moved)
    parser.add_argument("--kv-format", choices=KV_FORMATS, help="format of the cache's rows; default fp8_tile64")
    parser.add_argument("--indexer-format", choices=INDEXER_FORMATS, help="format of indexer keys; default mxfp4")
    same = "make what a prompt gives the same, bit for bit, whatever other prompts there are; on one device"
    parser.add_argument("--invariant", action="store_true", help=same)
    parser.add_argument("--mesh", help="devices: shards of requests x devices of each, such as 1x2")
    several = "this is one of several processes that have the devices of --mesh, as the cluster's environment says"
    parser.add_argument("--distributed", action="store_true", help=several)
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object of the new tokens and their drafts, and nothing else"
    )
    args = parser.parse_args(argv)
    if not args.prompts:
        parser.error("give at least one --prompt or --ids")
    has_text = any(given.text is not None for given in args.prompts)
    if args.chat and not has_text:
        parser.error("--chat is for --prompt")
    if args.bos is not None and (args.chat or not has_text):
        parser.error("--bos and --no-bos are for --prompt without --chat, which has a beginning of its own")
    if args.max_new < 1:
        parser.error(f"--max-new must be at least 1, got {args.max_new}")
    if args.drafts >= args.max_new:
        parser.error(f"--drafts must be less than --max-new {args.max_new}, got {args.drafts}")
    if args.invariant and args.mesh is not None:
        parser.error("--invariant is for one device, without --mesh")
    if args.least_confidence and not args.drafts:
        parser.error("--least-confidence is for --drafts")
    if args.distributed:
        if args.mesh is None:
            parser.error("--distributed is for --mesh")
        try:
            jax.distributed.initialize()  # before any device is looked at
        except (ValueError, RuntimeError) as error:
            parser.error(f"argument --distributed: {error}")
    if args.mesh is not None:
        try:
            args.mesh = mesh_of(args.mesh)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --mesh: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        with _heard():
            run(args)
    except (ValueError, RuntimeError, FileNotFoundError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """Of several processes, all of which make the same texts, let the first one speak; the others have but errors."""
    with contextlib.ExitStack() as stack:
        if jax.process_index():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def run(args: argparse.Namespace) -> None:
    """Do what the command's arguments say.

    Raises:
      ValueError, RuntimeError, FileNotFoundError, FloatingPointError: as ``load_model`` and ``Generator``; or a prompt
        cannot be read.
    """
    cfg = ModelConfig.from_hf(args.checkpoint)
    needs_text = any(given.text is not None for given in args.prompts)
    text = Text(args.checkpoint) if needs_text or (args.checkpoint / "tokenizer.json").exists() else None
    # All of it is checked before weights are loaded, which may take minutes.
    prompts = read_prompts([given.read(text, args.chat, args.bos) for given in args.prompts], cfg.vocab_size)
    sampling = Sampling.of(args.temperature, args.top_p, args.seed, args.least_confidence)
    options: Named = {"mesh": args.mesh, "invariant": args.invariant, **formats(args)}
    caches = caches_for(cfg, prompts, args.max_new, args.drafts, **options)
    with progress_bar(f"Loading {args.checkpoint.name}") as on_progress:
        form = args.weights, args.activations
        places = dict(mesh=args.mesh, host_experts=args.host_experts)
        params = load_model(args.checkpoint, *form, on_progress=on_progress, **places)
        jax.block_until_ready(params)
    print("Compiling, which takes minutes for a large model", file=sys.stderr)
    stops = () if args.ignore_eos else None  # the model's
    printer = Printer(text, cfg.stop_tokens if stops is None else stops, sys.stderr if args.json else sys.stdout)
    generator = Generator(params, drafts=args.drafts, caches=caches)
    if len(prompts) == 1:
        for token in generator.stream(prompts[0], args.max_new, sampling, stops):
            printer.add(token)
        printer.finish()
    else:
        printer.print_all(generator.generate(prompts, args.max_new, sampling, stops).tokens)
    print(summary(generator.result), file=sys.stderr)
    if args.json:
        print(json.dumps(as_json(generator.result)))


def formats(args: argparse.Namespace) -> dict[str, str]:
    """Return the formats of the caches that the arguments name."""
    chosen = {"kv_format": args.kv_format, "indexer_format": args.indexer_format}
    if args.weights == "f32":
        chosen = {name: one or "f32" for name, one in chosen.items()}
    return {name: one for name, one in chosen.items() if one}


def as_json(result: Generated) -> Named:
    """Return what ``--json`` prints."""
    if result.drafts is None:
        return {"tokens": result.tokens}
    drafts = [[None if one is None else one._asdict() for one in text] for text in result.drafts]
    return {"tokens": result.tokens, "drafts": drafts}


def summary(result: Generated) -> str:
    """Return a line with the speed, and how many drafts were accepted."""
    count = sum(len(tokens) for tokens in result.tokens)
    line = f"{count} tokens in {result.seconds:.2f} s, {count / result.seconds:.1f} tokens/s"
    if result.drafted:
        line += f"; {result.accepted} of {result.drafted} drafts accepted ({result.accepted / result.drafted:.0%})"
    return line


class Printer:
    """Prints what is made: of one prompt token by token, of several when all are complete."""

    def __init__(self, text: Text | None, stop_tokens: Sequence[int], file: TextIO) -> None:
        self._text, self._stop_tokens, self._file = text, stop_tokens, file
        self._tokens: list[int] = []
        self._shown = ""

    def _decode(self, tokens: list[int]) -> str:
        if self._text is None:
            return " ".join(map(str, tokens))
        ended = bool(tokens) and tokens[-1] in self._stop_tokens
        return self._text.decode(tokens[:-1] if ended else tokens)

    def add(self, token: int) -> None:
        """Print what is new of a single text, but for a character of which only a part is there."""
        self._tokens.append(token)
        made = self._decode(self._tokens).rstrip(REPLACEMENT)
        print(made[len(self._shown) :], end="", flush=True, file=self._file)
        self._shown = made

    def finish(self) -> None:
        """Print what was not printed yet."""
        print(self._decode(self._tokens)[len(self._shown) :], file=self._file)

    def print_all(self, tokens: list[list[int]]) -> None:
        for i, one in enumerate(tokens):
            print(f"[{i}] {self._decode(one)}", file=self._file)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show the bytes read, if the package rich is installed and someone is looking."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield None
        return

    class KeepsCursor(Console):
        """Ctrl-C ends the process at once, and a cursor that was hidden would stay so."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = KeepsCursor(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


if __name__ == "__main__":
    # Ctrl-C ends the process at once, as the system does it. Python itself raises KeyboardInterrupt, but only when the
    # main thread is back from C++, where compilation takes seconds to minutes. Where Ctrl-C is ignored, it still is.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
