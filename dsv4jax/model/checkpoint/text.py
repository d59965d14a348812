"""Text to token ids and back, for a checkpoint with a tokenizer, and the format of DeepSeek-V4's chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"


class Text:
    """The tokenizer of a checkpoint's folder."""

    def __init__(self, folder: str | Path) -> None:
        """Read ``tokenizer.json``, and of ``tokenizer_config.json``, if there is one, what begins a text.

        Raises:
          ValueError: the folder has no tokenizer, or the package ``tokenizers`` is not installed.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"{folder} has no tokenizer.json, so that prompts must be token ids")
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise ValueError('text needs the package tokenizers: pip install "dsv4jax[model]"') from error
        self._tokenizer = Tokenizer.from_file(str(file))
        options = folder / "tokenizer_config.json"
        options = json.loads(options.read_text()) if options.exists() else {}
        bos = options.get("bos_token")
        self._bos = bos["content"] if isinstance(bos, dict) else bos
        self.adds_bos = bool(options.get("add_bos_token"))  # whether the tokenizer begins each text with such a token

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Return the ids of a text as it is, after the token that begins a text if ``bos`` and it is not there yet.

        Raises:
          ValueError: there should be such a token, and tokenizer_config.json names none that the tokenizer has.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not bos:
            return ids
        begin = None if self._bos is None else self._tokenizer.token_to_id(self._bos)
        if begin is None:
            raise ValueError(f"no token begins a text: tokenizer_config.json has bos_token={self._bos!r}")
        return ids if ids[:1] == [begin] else [begin, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included. It may end in part of a character, which is U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def chat_text(turns: Sequence[tuple[str, str]], *, thinking: bool = False) -> str:
    """Return a chat as the text that the model was trained on, up to where its answer begins.

    Tools, and instructions on the effort of thinking, are left out here.

    Args:
      turns: (role, text), with roles "system" (only the first), "user" and "assistant"; the last is the user's.
      thinking: whether the model reasons before it answers. Reasoning in earlier answers is not part of the text.

    Raises:
      ValueError: a turn is no pair of strings, or the roles do not follow each other like this.
    """
    parts = [BOS]
    expected = ("system", "user")
    if isinstance(turns, str) or not isinstance(turns, Iterable):
        raise ValueError(f"turns must be pairs of role and text, such as [('user', 'Hi')], got {turns!r}")
    for i, turn in enumerate(turns):
        match turn:
            case (str() as role, str() as text):
                pass
            case _:
                raise ValueError(f"turns[{i}] must be a role and a text, such as ('user', 'Hi'), got {turn!r}")
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
