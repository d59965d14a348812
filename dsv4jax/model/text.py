"""Text to token ids and back, for a checkpoint with a tokenizer, and the format of DeepSeek-V4's chats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"


class Text:
    """The tokenizer of a checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        """Read ``tokenizer.json``.

        Raises:
          ValueError: the folder has none, or the package ``tokenizers`` is not installed.
        """
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"{folder} has no tokenizer.json, so that prompts must be token ids")
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise ValueError('text needs the package tokenizers: pip install "dsv4jax[model]"') from error
        self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as it is: nothing is added at its beginning or end."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included. It may end in part of a character, which is U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def chat_text(turns: Sequence[tuple[str, str]], thinking: bool = False) -> str:
    """Return a chat as the text that the model was trained on, up to where its answer begins.

    Tools, and instructions on the effort of thinking, are left out here.

    Args:
      turns: (role, text), with roles "system" (only the first), "user" and "assistant"; the last is the user's.
      thinking: whether the model reasons before it answers. Reasoning in earlier answers is not part of the text.

    Raises:
      ValueError: the roles do not follow each other like this.
    """
    parts = [BOS]
    expected = ("system", "user")
    for role, text in turns:
        if role not in expected:
            raise ValueError(f"expected a turn of {' or '.join(expected)}, got {role!r}")
        if role == "assistant":
            parts += [END_THINK, text, EOS]
        else:
            parts += [text] if role == "system" else [USER, text, ASSISTANT]
        expected = {"system": ("user",), "user": ("assistant",), "assistant": ("user",)}[role]
    if expected != ("assistant",):
        raise ValueError("the last turn of a chat must be the user's")
    return "".join([*parts, THINK if thinking else END_THINK])
