"""The kinds of layers, and all that tells one kind from another.

A layer attends to its sliding window (SWA), to the window and to compressed entries that an indexer picks (CSA), or to
the window and to all of its heavily compressed entries (HCA). The rest of the library asks for the properties below and
never for a kind by name. What a compressor keeps between steps follows from them too: see ``tails``.
"""

from __future__ import annotations

import enum


class AttentionType(enum.StrEnum):
    """Kind of a layer. A member equals its string, so ``"csa"`` serves wherever a kind is asked for."""

    SWA = "swa"
    CSA = "csa"
    HCA = "hca"

    @classmethod
    def _missing_(cls, value: object) -> AttentionType:
        raise ValueError(f"kind must be one of {[kind.value for kind in cls]}, got {value!r}")

    @property
    def compresses(self) -> bool:
        """Whether tokens become compressed entries in a pool, beside the window."""
        return self is not AttentionType.SWA

    @property
    def overlaps(self) -> bool:
        """Whether an entry also draws on the block before its own, so that a token contributes two streams."""
        return self is AttentionType.CSA

    @property
    def is_indexed(self) -> bool:
        """Whether an indexer picks the entries that a query reads. Each entry then has a key in the pool."""
        return self is AttentionType.CSA

    @property
    def hf_name(self) -> str:
        """The kind's name in the configurations of transformers."""
        return _HF_NAMES[self]


_HF_NAMES = {
    AttentionType.SWA: "sliding_attention",
    AttentionType.CSA: "compressed_sparse_attention",
    AttentionType.HCA: "heavily_compressed_attention",
}
