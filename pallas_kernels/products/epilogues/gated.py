"""SwiGLU of the sums of a product, whose weight has the gates' outputs in its first half and the ups' in its second.

    y = silu(min(gate, limit)) * clip(up, -limit, limit)

Gates and ups are rounded to bf16 first, as the product alone would store them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from pallas_kernels.activations import ActivationRows, PlainRows
from pallas_kernels.language.values import VECTOR, Value
from pallas_kernels.products.epilogues.faces import TILE_PITCH, BlockSums, Extras, LastSteps
from pallas_kernels.products.problem import Epilogue, Unsupported, WeightSpec
from pallas_kernels.products.weights import ROWS, TILE
from pallas_kernels.rows import swiglu, through_bf16

_AT_ONCE = 2 * VECTOR  # outputs of a row that a lane makes together


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU(Epilogue):
    """Gated rows, bf16 [M, outputs / 2], plain or of a class that holds bf16 in another order."""

    limit: float = 0.0  # 0 for none
    kind: type[ActivationRows] = PlainRows

    name: ClassVar[str] = "product_gated"
    is_gated: ClassVar[bool] = True
    # So that a block has two tiles with all of their inputs where the product runs beside that of experts.
    most_parts: ClassVar[int | None] = 2

    def state(self, rows: int, outputs: int) -> Any:
        return self.kind.shapes(rows, outputs // 2)

    def unsupported(self, rows: int, weight: WeightSpec) -> Unsupported | None:
        if rows > ROWS or weight.groups != 1:
            reason = f"gated rows are made of few rows and one group, got {rows} and {weight.groups}"
            return Unsupported(kind="no kernel", reason=reason)
        return None

    def few(self, block: BlockSums, extras: Extras, out: Any) -> LastSteps:
        """A warpgroup gathers its sums in shared memory, gates beside the ups that belong to them."""
        machine, places = block.machine, list(block.places(out.shape[0], _AT_ONCE))

        def sums(at: Value) -> list[Value]:
            words = [word for n in range(0, _AT_ONCE, VECTOR) for word in machine.load_shared(at + n * 4, VECTOR * 4)]
            return through_bf16([machine.from_bits(word) for word in words])

        def store(eights: list[list[Value]]) -> None:
            base = block.gather_tile(eights)
            for place in places:
                at = place.line * TILE_PITCH + place.unit * (_AT_ONCE * 4) + base
                gates, ups = sums(at), sums(at + TILE // 2 * 4)
                made = [swiglu(machine, gate, up, self.limit) for gate, up in zip(gates, ups, strict=True)]
                out.store_line(made, place.row, place.output, where=place.there)

        return store
