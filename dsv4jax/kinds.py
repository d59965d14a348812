"""The three kinds of attention layers, and the properties in which they differ.

A layer attends to its sliding window alone (SWA), to the window and to compressed entries picked by an indexer (CSA),
or to the window and all of its heavily compressed entries (HCA). The rest of the library tests the properties below
instead of comparing with a particular kind. They also decide what a compressor keeps between steps: see ``tails``.
"""

from __future__ import annotations

import enum


class AttentionType(enum.StrEnum):
    """Kind of a layer. Members are strings, so ``"csa"`` can be given wherever a kind is expected."""

    SWA = "swa"
    CSA = "csa"
    HCA = "hca"

    @classmethod
    def _missing_(cls, value: object) -> AttentionType:
        raise ValueError(f"kind must be one of {[kind.value for kind in cls]}, got {value!r}")

    @property
    def compresses(self) -> bool:
        """Whether the layer turns tokens into compressed entries, stored in a pool, in addition to its window."""
        return self is not AttentionType.SWA

    @property
    def overlaps(self) -> bool:
        """Whether an entry also uses the block before its own, so that each token contributes two streams."""
        return self is AttentionType.CSA

    @property
    def is_indexed(self) -> bool:
        """Whether an indexer picks the entries that a query reads.

        If so, the pool stores an indexer key for each entry.
        """
        return self is AttentionType.CSA

    @property
    def hf_name(self) -> str:
        """The name of this kind in the configurations of transformers."""
        return _HF_NAMES[self]


_HF_NAMES = {
    AttentionType.SWA: "sliding_attention",
    AttentionType.CSA: "compressed_sparse_attention",
    AttentionType.HCA: "heavily_compressed_attention",
}
