"""The command python -m dsv4jax.generate: the recorded tokens, text as it is made, chats, and errors in one line.

Both tests that run the model feed it as many tokens, so that they share a compiled program.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax import generate as command
from dsv4jax.model import Generated, Text, chat_text
from tests.support.paths import DATA

MODEL = DATA / "model" / "a"
RECORDED = np.load(MODEL / "recorded.npz")
PROMPT_LENGTH = int(RECORDED["prompt_len"])
PROMPT, GREEDY = np.split(RECORDED["ids"], [PROMPT_LENGTH])
EXACT = ["--temperature", "0", "--weights", "f32", "--max-new", str(len(GREEDY)), "--ignore-eos"]
# Characters of one to four bytes, so that a text is cut within most of them.
COMPILING = "Compiling, which takes minutes for a large model\n"
MIXED = "plain, Gr\u00fc\u00dfe, \u65e5\u672c\u8a9e, \U0001f680\U0001f30d!\n" * 3


@pytest.fixture(autouse=True)
def nobody_looks(monkeypatch):
    """Whether there is a progress bar is decided by the stream, and not by the environment of the tests."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def as_argument(ids) -> str:
    return ",".join(map(str, ids))


@pytest.fixture(scope="module")
def folder_with_tokenizer(tmp_path_factory) -> Path:
    """Model a, with the tokenizer of model q, whose ids are the bytes of a text."""
    pytest.importorskip("tokenizers", reason="text needs tokenizers, of the extra 'model'")
    folder = tmp_path_factory.mktemp("model")
    for file in (MODEL / "config.json", MODEL / "model.safetensors", DATA / "model" / "q" / "tokenizer.json"):
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def folder_without_drafts(tmp_path_factory) -> Path:
    """Model a without its MTP block. The layout of the file: 8 bytes of header length, JSON, data."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").symlink_to(MODEL / "config.json")
    whole = (MODEL / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header, kept, data = json.loads(whole[8:begin]), {}, b""
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        if not name.startswith("mtp."):
            first, end = tensor["data_offsets"]
            kept[name] = tensor | {"data_offsets": [len(data), len(data) + end - first]}
            data += whole[begin + first : begin + end]
    assert 0 < len(kept) < len(header)
    text = json.dumps(kept).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


@pytest.mark.sweep(guard="test_text_is_printed_as_it_is_made")
def test_the_recorded_tokens(capsys):
    """With --json standard output is JSON alone; what is said otherwise goes to standard error."""
    assert command.main([str(MODEL), "--ids", as_argument(PROMPT), *EXACT, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"tokens": [GREEDY.tolist()]}
    said, speed = captured.err.removeprefix(COMPILING).splitlines()
    assert said == " ".join(map(str, GREEDY))
    assert speed.startswith(f"{len(GREEDY)} tokens in ")


@pytest.mark.sweep(guard="test_text_is_printed_as_it_is_made")
def test_the_recorded_tokens_with_the_drafts_of_dspark(capsys):
    """Of a folder in DeepSeek's names. A confidence that is asked for leaves fewer drafts to be judged."""
    recorded = np.load(DATA / "model" / "d" / "recorded.npz")
    prompt, greedy = np.split(recorded["ids"], [int(recorded["prompt_len"])])
    arguments = [str(DATA / "model" / "d"), "--ids", as_argument(prompt), *EXACT, "--drafts", "5", "--json"]
    judged, accepted = 0, 0
    for least in (0.0, 0.5):
        assert command.main([*arguments, f"--least-confidence={least}"]) == 0
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        assert found["tokens"] == [greedy.tolist()]
        (drafts,) = found["drafts"]
        assert len(drafts) == len(greedy)
        assert drafts[0] is None, "the first token comes of the prompt"
        there = [one for one in drafts if one]
        assert all(least <= one["confidence"] < 1 for one in there)
        before = judged, accepted
        ((accepted, judged),) = re.findall(r"(\d+) of (\d+) drafts accepted", captured.err)
        judged, accepted = int(judged), int(accepted)
        assert sum(one["accepted"] for one in there) == accepted
    assert before == (101, 42)
    assert 0 < judged < 101
    assert accepted <= judged


@pytest.mark.slow
def test_text_is_printed_as_it_is_made(folder_with_tokenizer, capsys, monkeypatch):
    pieces = []

    class Counting(command.Printer):
        def add(self, token: int) -> None:
            super().add(token)
            pieces.append(capsys.readouterr().out)

    monkeypatch.setattr(command, "Printer", Counting)
    prompt = "Once upon a time, there was a model. ".ljust(PROMPT_LENGTH, ".")
    assert command.main([str(folder_with_tokenizer), "--prompt", prompt, *EXACT]) == 0
    assert len(pieces) == len(GREEDY)
    assert sum(map(bool, pieces)) > len(GREEDY) / 4, "few bytes of a random model end a character"
    assert "".join(pieces) + capsys.readouterr().out


@pytest.fixture
def asked(monkeypatch) -> dict:
    """What the command asks of a generator, which answers two tokens to each prompt without running a model."""
    given = {}

    class Answering:
        def __init__(self, params, drafts, caches) -> None:
            given.update(params=params, drafts=drafts, caches=caches)

        def generate(self, prompts, max_new, sampling, stop_tokens) -> Generated:
            prompts = [prompt.tolist() for prompt in prompts]
            given.update(prompts=prompts, max_new=max_new, sampling=sampling, stop_tokens=stop_tokens)
            tokens = [[7, 8] for _ in prompts]
            counts = {"passes": 2, "stored": 0, "drafted": 8, "accepted": 2, "seconds": 0.5}
            log_probs = [[-0.5, -0.25] for _ in prompts]
            self.result = Generated(tokens=tokens, log_probs=log_probs, sampled_log_probs=log_probs, **counts)
            return self.result

        def stream(self, prompt, *options):
            yield from self.generate([prompt], *options).tokens[0]

    monkeypatch.setattr(command, "Generator", Answering)
    return given


@pytest.mark.parametrize(("options", "text"), [([], "Hi"), (["--chat"], chat_text([("user", "Hi")]))])
def test_a_prompt_is_text_or_what_a_user_says(options, text, folder_with_tokenizer, asked):
    assert command.main([str(folder_with_tokenizer), "--prompt", "Hi", *options]) == 0
    assert asked["prompts"] == [Text(folder_with_tokenizer).encode(text)]
    assert Text(folder_with_tokenizer).decode(asked["prompts"][0]) == text


@pytest.mark.parametrize(
    ("config", "options", "begins"),
    [
        ({"add_bos_token": True, "bos_token": "~"}, [], True),
        ({"add_bos_token": True, "bos_token": {"__type": "AddedToken", "content": "~"}}, [], True),
        ({"add_bos_token": True, "bos_token": "~"}, ["--no-bos"], False),
        ({"add_bos_token": False, "bos_token": "~"}, [], False),
        ({"add_bos_token": False, "bos_token": "~"}, ["--bos"], True),
        ({"bos_token": "~"}, [], False),
        (None, [], False),
        (None, ["--no-bos"], False),
    ],
)
def test_a_text_begins_with_a_token_as_the_tokenizer_does_it(
    config, options, begins, folder_with_tokenizer, tmp_path, asked
):
    folder = copied(folder_with_tokenizer, tmp_path, config)
    text = Text(folder)
    assert command.main([str(folder), "--prompt", "Hi", "--ids", "5", "--prompt", "~Hi", *options]) == 0
    assert asked["prompts"] == [text.encode("~Hi" if begins else "Hi"), [5], text.encode("~Hi")]


@pytest.mark.parametrize("config", [None, {}, {"bos_token": None}, {"bos_token": "<none>"}])
def test_a_tokenizer_without_such_a_token(config, folder_with_tokenizer, tmp_path, capsys):
    folder = copied(folder_with_tokenizer, tmp_path, config)
    assert command.main([str(folder), "--prompt", "Hi", "--bos"]) == 1
    assert "no token begins a text: tokenizer_config.json has bos_token=" in one_error(capsys.readouterr())


def copied(folder: Path, to: Path, tokenizer_config: dict | None) -> Path:
    for file in folder.iterdir():
        (to / file.name).symlink_to(file.resolve())
    if tokenizer_config is not None:
        (to / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return to


def test_options_reach_the_loop(asked, capsys):
    options = ["--max-new", "9", "--temperature", "0.5", "--top-p", "0.25", "--drafts", "3", "--kv-format", "bf16"]
    assert command.main([str(MODEL), "--ids", "5,17,3", "--ids", " 2 ", *options]) == 0
    assert asked["prompts"] == [[5, 17, 3], [2]]
    assert (asked["max_new"], asked["drafts"], asked["stop_tokens"]) == (9, 3, None), "the model's own stop tokens"
    assert (float(asked["sampling"].temperature), float(asked["sampling"].top_p)) == (0.5, 0.25)
    assert asked["params"].embedding.dtype == jnp.bfloat16, "weights as in the file, unless asked otherwise"
    plan = asked["caches"].model.plan
    assert (plan.max_requests, plan.kv_format, plan.indexer_format) == (2, "bf16", "mxfp4")
    assert plan.max_context >= 3 + 9
    assert asked["caches"].drafts is not None
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["[0] 7 8", "[1] 7 8"]
    assert captured.err == COMPILING + "4 tokens in 0.50 s, 8.0 tokens/s; 2 of 8 drafts accepted (25%)\n"


def test_json_of_several_prompts_is_alone(asked, capsys):
    assert command.main([str(MODEL), "--ids", "5", "--ids", "6", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"tokens": [[7, 8], [7, 8]]}
    assert captured.err.startswith(f"{COMPILING}[0] 7 8\n[1] 7 8\n4 tokens in ")


def test_with_float32_weights_the_cache_is_float32(asked):
    assert command.main([str(MODEL), "--ids", "5", "--weights", "f32", "--ignore-eos"]) == 0
    plan = asked["caches"].model.plan
    assert (plan.kv_format, plan.indexer_format, asked["caches"].drafts) == ("f32", "f32", None)
    assert (asked["params"].embedding.dtype, asked["stop_tokens"]) == (jnp.float32, ())


@pytest.mark.sweep(guard="test_text_is_printed_as_it_is_made")
@pytest.mark.skipif(sys.platform == "win32", reason="a process there has no SIGINT")
def test_ctrl_c_ends_it_at_once_while_it_compiles():
    """The signal is set first, because a process in the background may be started to ignore it, and so are its own."""
    program = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "runpy.run_module('dsv4jax.generate', run_name='__main__', alter_sys=True)"
    # On the CPU everywhere: a GPU takes its time to let go of a process that is killed.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(MODEL), "--ids", "5,17,3"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        said = ""
        while not said.endswith(COMPILING):
            said += (line := running.stderr.readline())
            assert line, said
        time.sleep(3)  # it traces first, which is Python; it compiles for 10 s and more
        assert running.poll() is None
        began = time.monotonic()
        running.send_signal(signal.SIGINT)
        out, said = running.communicate(timeout=60)
        assert time.monotonic() - began < 1
    assert (running.returncode, out, said) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_terminals(terminal, capsys, monkeypatch):
    pytest.importorskip("rich", reason="the progress bar needs rich, of the extra 'model'")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with command.progress_bar("Loading a model") as on_progress:
        assert on_progress is not None
        on_progress(3, 7)
    captured = capsys.readouterr()
    assert ("Loading a model" in captured.err) == bool(captured.err) == terminal
    assert not captured.out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("valid", [True, False])
def test_pieces_of_text_add_up(valid, seed, folder_with_tokenizer):
    """No piece ends in a part of a character, whatever the bytes are."""
    text, file = Text(folder_with_tokenizer), io.StringIO()
    tokens = text.encode(MIXED) if valid else np.random.default_rng(seed).integers(0, 256, 80).tolist()
    printer = command.Printer(text, (), file)
    for count, token in enumerate(tokens, 1):
        printer.add(token)
        shown = file.getvalue()
        assert not shown.endswith(command.REPLACEMENT)
        assert text.decode(tokens[:count]).startswith(shown)
    printer.finish()
    assert file.getvalue() == text.decode(tokens) + "\n"
    assert (file.getvalue() == MIXED + "\n") == valid


def printed(text: Text | None, stop_tokens, tokens: list[int]) -> str:
    """What is printed of a single text."""
    printer = command.Printer(text, stop_tokens, file := io.StringIO())
    for token in tokens:
        printer.add(token)
    printer.finish()
    return file.getvalue()


def test_the_token_that_ends_a_text_is_not_printed(folder_with_tokenizer):
    """As an id it is, because it is one of the new tokens; and within a text, as --ignore-eos makes them, too."""
    text, file = Text(folder_with_tokenizer), io.StringIO()
    whole, end = text.encode("a.b."), text.encode(".")
    assert printed(text, end, whole) == "a.b\n"
    assert printed(None, [7], [5, 7]) == "5 7\n"
    command.Printer(text, end, file).print_all([whole, end, whole[:3]])
    assert file.getvalue() == "[0] a.b\n[1] \n[2] a.b\n"


def one_error(captured) -> str:
    """The message of a command that failed and printed nothing else but that it compiles."""
    assert not captured.out
    line = captured.err.removeprefix(COMPILING).removesuffix("\n")
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "5,256"], r"prompts\[0\] must be token ids in \[0, 256\)"),
        (["--ids=-1"], r"prompts\[0\] must be token ids"),
        (["--ids", "5", "--drafts=-1"], "drafts must be an integer of at least 0, got -1"),
        (["--ids", "5", "--drafts=17"], "drafts must be at most 16, got 17"),
        (["--ids", "5", "--temperature=-1"], "temperature must be at least 0"),
        (["--ids", "5", "--drafts=1", "--least-confidence=2"], r"least_confidence must be in \[0, 1\], got 2"),
        (["--ids", "5", "--top-p", "0"], "top_p must be in"),
        (["--prompt", "Hi"], "has no tokenizer.json, so that prompts must be token ids"),
    ],
)
def test_an_error_is_one_line_and_comes_before_weights_are_loaded(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("loading may take minutes"))
    assert command.main([str(MODEL), *arguments]) == 1
    assert re.search(message, one_error(capsys.readouterr()))


def test_weights_that_are_not_stored_have_no_activations(capsys):
    assert command.main([str(MODEL), "--ids", "5", "--weights", "bf16", "--activations", "fp8"]) == 1
    assert "activations and dtype are for weights='stored'" in one_error(capsys.readouterr())


def test_drafts_that_a_checkpoint_cannot_make(folder_without_drafts, capsys):
    assert command.main([str(folder_without_drafts), "--ids", "5", "--drafts", "1"]) == 1
    message = "error: this model cannot make drafts: its checkpoint holds no block for them"
    assert one_error(capsys.readouterr()).startswith(message)


@pytest.mark.parametrize("folder", ["nothing", "."], ids=["no folder", "no config.json"])
def test_a_folder_without_a_model(folder, tmp_path, capsys):
    assert command.main([str(tmp_path / folder), "--ids", "5"]) == 1
    assert str(tmp_path / folder) in one_error(capsys.readouterr())


def test_a_folder_of_another_model_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert command.main([str(tmp_path), "--ids", "5"]) == 1
    assert "configuration of a 'llama' model lacks ['vocab_size', " in one_error(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one --prompt or --ids"),
        (["--ids", "5,x"], "argument --ids: must be token ids with commas between them, such as 5,17,3; got '5,x'"),
        (["--ids", ""], "argument --ids: must be token ids"),
        (["--ids", "5", "--drafts", "50", "--max-new", "4"], "--drafts must be less than --max-new 4, got 50"),
        (["--ids", "5", "--least-confidence", "0.5"], "--least-confidence is for --drafts"),
        (["--prompt", "Hi", "--chat", "--bos"], "--bos and --no-bos are for --prompt without --chat"),
        (["--ids", "5", "--no-bos"], "--bos and --no-bos are for --prompt"),
        (["--ids", "5", "--chat"], "--chat is for --prompt"),
        (["--ids", "5", "--max-new", "0"], "--max-new must be at least 1, got 0"),
        (["--ids", "5", "--weights", "narrow"], "argument --weights: invalid choice: 'narrow'"),
    ],
)
def test_arguments_that_do_not_fit_show_the_usage(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([str(MODEL), *arguments])
    captured = capsys.readouterr()
    assert captured.err.startswith("usage: python -m dsv4jax.generate ")
    assert f"error: {message}" in captured.err


BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("turns", "thinking", "text"),
    [
        ([("user", "Hi")], False, f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"),
        ([("user", "Hi")], True, f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"),
        ([("system", "Be brief."), ("user", "Hi")], False, f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>"),
        (
            [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")],
            True,  # an earlier turn has lost its reasoning
            f"{BOS}<｜User｜>Hi<｜Assistant｜></think>Hello{EOS}<｜User｜>Bye<｜Assistant｜><think>",
        ),
    ],
)
def test_the_text_of_a_chat(turns, thinking, text):
    assert chat_text(turns, thinking=thinking) == text


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "the last turn of a chat must be the user's"),
        ([("system", "Be brief.")], "the last turn of a chat must be the user's"),
        ([("user", "Hi"), ("assistant", "Hello")], "the last turn of a chat must be the user's"),
        ([("assistant", "Hello")], "expected a turn of system or user, got 'assistant'"),
        ([("user", "Hi"), ("user", "Hi")], "expected a turn of assistant, got 'user'"),
        ([("user", "Hi"), ("system", "Be brief.")], "expected a turn of assistant, got 'system'"),
        ([("tool", "42")], "expected a turn of system or user, got 'tool'"),
        ("Hi", r"turns must be pairs of role and text, such as \[\('user', 'Hi'\)\], got 'Hi'"),
        (5, "turns must be pairs of role and text, .* got 5"),
        (["Hi"], r"turns\[0\] must be a role and a text, such as \('user', 'Hi'\), got 'Hi'"),
        ([("user", "Hi"), ("assistant",)], r"turns\[1\] must be a role and a text, .* got \('assistant',\)"),
        ([{"role": "user", "content": "Hi"}], r"turns\[0\] must be a role and a text, .* got {'role': 'user'"),
        ([("user", None)], r"turns\[0\] must be a role and a text, .* got \('user', None\)"),
    ],
)
def test_turns_that_make_no_chat(turns, message):
    with pytest.raises(ValueError, match=message):
        chat_text(turns)
