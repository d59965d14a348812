"""Arrays in a block's shared memory.

    keys = Shared.take(machine, (stages, 64, 2), "f32")
    a, b = keys.load_floats(stage, key, 0, count=2)
    keys[stage].store_floats([a, b], key, 0, where=key < 64)

The memory is uninitialised at first. Accesses by different lanes must be ordered by barriers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import VECTOR, Condition, Index, Step, Value

SharedDType = Literal["f32", "i32", "u16", "u8"]
_ITEMSIZE: dict[SharedDType, int] = {"f32": 4, "i32": 4, "u16": 2, "u8": 1}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """An array in the block's shared memory: f32, i32, u16 or u8, in row-major order.

    One access moves ``count`` adjacent elements along the last axis, 1, 2, 4, 8 or 16 bytes in all, at an offset that
    is a multiple of their size. The last index is that of the first element. An index is a Value or an int. With
    ``rank``, a store goes to the shared memory of the block with that rank in the cluster.
    """

    machine: Machine
    offset: Index  # bytes from the beginning of the block's shared memory
    shape: tuple[int, ...]
    dtype: SharedDType

    @classmethod
    def take(cls, machine: Machine, shape: tuple[int, ...], dtype: SharedDType) -> Shared:
        """Allocate shared memory for an array, 16-byte aligned. Raises TypeError for an unsupported dtype."""
        if dtype not in _ITEMSIZE:
            raise TypeError(f"shared memory holds {', '.join(_ITEMSIZE)}, got {dtype!r}")
        return cls(machine, machine.take_shared(math.prod(shape) * _ITEMSIZE[dtype]), shape, dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZE[self.dtype]

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.itemsize

    def view(self, shape: tuple[int, ...], dtype: SharedDType) -> Shared:
        """Return the same memory, from its first byte on, as another array. Raises ValueError if that is larger."""
        other = dataclasses.replace(self, shape=shape, dtype=dtype)
        if other.size > self.size:
            raise ValueError(f"{dtype} {shape} takes {other.size} bytes, {self.dtype} {self.shape} has {self.size}")
        return other

    def __getitem__(self, index: Index) -> Shared:
        """Return the array at an index of the first axis, without that axis."""
        if not self.shape:
            raise TypeError("an array without axes cannot be indexed")
        return dataclasses.replace(self, offset=self._at((index,)), shape=self.shape[1:])

    def address_of(self, *index: Index) -> Value:
        """Return an element's i32 byte offset in the block's shared memory."""
        if len(index) != len(self.shape):
            raise TypeError(f"an array of shape {self.shape} takes {len(self.shape)} indices, got {len(index)}")
        at = self._at(index)
        return at if isinstance(at, Value) else self.machine.constant(at, "i32")

    def _at(self, index: Sequence[Index]) -> Index:
        """Return the byte offset at indices of the first axes. Constants are added last."""
        offset, known = (self.offset, 0) if isinstance(self.offset, Value) else (None, self.offset)
        for axis, i in enumerate(index):
            stride = math.prod(self.shape[axis + 1 :]) * self.itemsize
            if isinstance(i, Value):
                offset = i * stride if offset is None else offset + i * stride
            elif 0 <= i < self.shape[axis]:
                known += i * stride
            else:
                raise IndexError(f"index {i} along an axis of {self.shape[axis]}")
        if offset is None:
            return known
        return offset + known if known else offset

    def _expect(self, *dtypes: SharedDType) -> None:
        if self.dtype not in dtypes:
            raise TypeError(f"an array of {' or '.join(dtypes)} is meant, this one is of {self.dtype}")

    # Floats.
    def load_floats(self, *index: Index, count: int = VECTOR) -> Step:
        """Load ``count`` adjacent elements of an f32 array."""
        self._expect("f32")
        return [self.machine.from_bits(word) for word in self.load_words(*index, count=count)]

    def store_floats(self, values: Step, *index: Index, where: Condition = True, rank: int | None = None) -> None:
        """Store values to adjacent elements of an f32 array."""
        self._expect("f32")
        self.store_words([self.machine.bits(value) for value in values], *index, where=where, rank=rank)

    # Whole numbers.
    def load_int(self, *index: Index) -> Value:
        """Load an element of an i32, u16 or u8 array, as i32."""
        self._expect("i32", "u16", "u8")
        return self.machine.load_shared(self.address_of(*index), self.itemsize)[0]

    def store_int(self, value: Value, *index: Index, where: Condition = True, rank: int | None = None) -> None:
        """Store the low bits of an i32 to an element of an i32, u16 or u8 array."""
        self._expect("i32", "u16", "u8")
        self.machine.store_shared(self.address_of(*index), [value], self.itemsize, where, rank=rank)

    def add_int(self, value: Value, *index: Index, where: Condition = True, rank: int | None = None) -> Value:
        """Add to an element of an i32 array atomically. Returns its value before, or 0 where ``where`` is False."""
        self._expect("i32")
        return self.machine.add_shared(self.address_of(*index), value, where, rank=rank)

    # Elements without conversion.
    def load_words(self, *index: Index, count: int) -> list[Value]:
        """Load ``count`` elements of any dtype without conversion, packed into i32, the first in the low bits."""
        return self.machine.load_shared(self.address_of(*index), count * self.itemsize)

    def store_words(
        self, words: Sequence[Value], *index: Index, where: Condition = True, rank: int | None = None
    ) -> None:
        """Store elements of any dtype, packed into i32 as ``load_words`` returns them."""
        self.machine.store_shared(self.address_of(*index), words, 4 * len(words), where, rank=rank)
