"""What a store of prefixes writes to a file: tokens and slots. The cache that holds the prefixes is saved beside it."""

from __future__ import annotations

import dataclasses
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

# What reading a file raises that is no archive of arrays, a damaged one, or one of other arrays.
_OTHERS = (IsADirectoryError, LookupError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedPrefixes:
    """The contents of a file."""

    capacity: int  # of a shard
    every: int | None
    shards: int
    prefixes: tuple[tuple[int, np.ndarray], ...]  # slot among those of all shards, and tokens; the oldest use first

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a new file. Raises FileExistsError if there is something at ``path``."""
        sizes = np.array([[slot, tokens.size] for slot, tokens in self.prefixes], np.int64).reshape(-1, 2)
        tokens = np.concatenate([np.zeros(0, np.int32), *(tokens for _, tokens in self.prefixes)])
        with Path(path).open("xb") as file:
            policy = np.array([self.capacity, self.every or 0, self.shards])
            np.savez_compressed(file, sizes=sizes, tokens=tokens, policy=policy)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SavedPrefixes:
        """Read a file. Raises FileNotFoundError, or ValueError if it is none that ``write`` made."""
        try:
            with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                sizes, tokens = file["sizes"], file["tokens"]
                capacity, every, *shards = file["policy"].tolist()  # older files have no shards
            prefixes = zip(sizes[:, 0].tolist(), np.split(tokens, np.cumsum(sizes[:, 1])), strict=False)
        except _OTHERS as error:
            raise ValueError(f"{path} is no file of a PrefixStore, or a damaged one") from error
        return cls(capacity=capacity, every=every or None, shards=max(shards, default=1), prefixes=tuple(prefixes))
