"""Tiles that know the dtype of their elements, so that bodies count in elements.

a = TypedTile.take(machine, 64, 64, "bf16", copies=3)
pipe.commit(i, a[stage].copy_from(x, row, column))       # ``pipeline``
total = product(total, a[stage], b[stage])               # ``fragment``
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import Machine
from pallas_kernels.language.tensor_cores import ATOM_BYTES, DType, Operand, Tile, TileCopy
from pallas_kernels.language.values import Index, Value

ITEMSIZE: dict[DType, int] = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}
_STORED_AS: dict[DType, tuple[str, ...]] = {
    "f16": ("float16",),
    "bf16": ("bfloat16",),
    "e4m3": ("uint8", "float8_e4m3fn"),
    "e5m2": ("uint8", "float8_e5m2"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TypedTile:
    """A matrix [rows, columns] of one dtype in shared memory, in the layout that tensor cores read."""

    tile: Tile  # the same memory, in bytes
    dtype: DType

    @classmethod
    def take(cls, machine: Machine, rows: int, columns: int, dtype: DType, copies: int = 1) -> TypedTile:
        """Allocate shared memory for ``copies`` adjacent tiles, of which an index selects one.

        A tile takes rows * columns elements, and the first of them begins at a multiple of 1,024 bytes.

        Raises:
          TypeError: rows are not whole times 8, or a row of ``columns`` elements not whole times 128 bytes.
        """
        row_bytes = columns * ITEMSIZE[dtype]
        if rows % 8 or row_bytes % ATOM_BYTES:
            raise TypeError(
                f"a tile of {rows} rows of {columns} {dtype}: write rows in eights, and columns in "
                f"{ATOM_BYTES // ITEMSIZE[dtype]}s"
            )
        return cls(tile=Tile.take(machine, rows, row_bytes, copies=copies), dtype=dtype)

    @property
    def rows(self) -> int:
        """Rows of one copy."""
        return self.tile.rows

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.tile.row_bytes // ITEMSIZE[self.dtype]

    def __getitem__(self, number: Index) -> TypedTile:
        """Return one of the copies: ``a[stage]``."""
        return dataclasses.replace(self, tile=self.tile.copy(number))

    def copy_from(self, source: Buffer, row: Index, column: Index) -> TileCopy:
        """Return a copy of a part of an array, for ``Pipeline.commit`` or ``Barrier.fill``.

        Args:
          source: an input of the launch, of two axes. Arrays of uint8 are taken for either 8-bit float.
          row, column: its element that becomes the tile's first. What is past the array's end becomes zeros.

        Raises:
          TypeError: the array has another dtype, or a tile's row is longer than the 128 bytes that a copy fills.
        """
        if source.dtype.name not in _STORED_AS[self.dtype]:
            raise TypeError(f"a tile of {self.dtype} is copied from an array of {source.dtype.name}")
        if self.tile.row_bytes != ATOM_BYTES:
            raise TypeError(f"a copy fills rows of {ATOM_BYTES} bytes, these have {self.tile.row_bytes}")
        return TileCopy(
            source=source, row=row, column=column, to=self.tile.offset, rows=self.rows, row_bytes=self.tile.row_bytes
        )

    def unit(self, row: Value, unit: Index) -> Value:
        """Return the i32 byte offset of a row's 16-byte unit, for ``store_shared`` and ``load_shared``, as ``Tile``."""
        return self.tile.unit(row, unit)

    def k_major(self, first: int = 0, count: int | None = None) -> Operand:
        """Return all rows as an operand, with ``count`` columns of each from ``first`` on as K; all by default."""
        size = ITEMSIZE[self.dtype]
        return self.tile.k_major(first * size, None if count is None else count * size)

    def transposed(self, first: int = 0) -> Operand:
        """Return an operand with all rows as K, whose columns are those from ``first`` on, a multiple of 64."""
        return self.tile.transposed(first * ITEMSIZE[self.dtype])
