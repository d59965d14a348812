"""The launch of a product of many rows, on Hopper."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType

import jax

from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows
from pallas_kernels.language.launch import launch
from pallas_kernels.products.epilogues.faces import Made
from pallas_kernels.products.many import bf16, fp8, wide
from pallas_kernels.products.many.tiles import ManyInputs, needed_tiles
from pallas_kernels.products.many.tiling import Tiling

_KERNELS: dict[str, ModuleType] = {"bf16": bf16, "fp8": fp8}  # by the activations of FP8 weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """A launch of one product, after a launch that rounds x where the weight asks for it."""

    tiling: Tiling

    def launch(
        self,
        x: ActivationRows,
        weights: list[tuple[jax.Array, ...]],
        extras: dict[str, jax.Array],
        needed: jax.Array | None,
        *,
        simulate: bool,
    ) -> list[Made]:
        """Return what is made. Sums are added in place to the rows ``onto`` in ``extras``, if there are any."""
        tiling, ((weight, *scales),) = self.tiling, weights
        tiles = None
        if needed is not None and tiling.parts == 1:
            tiles = needed_tiles(needed, tiling.tile_rows, tiling.output_tiles)
        if tiling.is_rounded:
            rounded = x.rounded(needed=needed, simulate=simulate)
            values, of_x = rounded.codes, rounded.scales
        else:
            assert isinstance(x, PlainRows | OperandRows)
            values, of_x = x.values, None
        onto = extras.get("onto")
        inputs = ManyInputs(
            x=values,
            x_scales=of_x,
            weight=weight,
            scales=scales[0] if scales else None,
            extras={name: extra for name, extra in extras.items() if name != "onto"},
            needed=tiles,
        )
        return [self.launch_tiles(inputs, onto, simulate=simulate)]

    def launch_tiles(
        self, inputs: ManyInputs[jax.Array], onto: jax.Array | None = None, *, simulate: bool = False
    ) -> Made:
        """Launch the kernel itself."""
        tiling, epilogue = self.tiling, self.tiling.epilogue
        state = epilogue.state_of_many(tiling.rows, tiling.weight.shape[0])
        made = launch(
            functools.partial((wide if tiling.is_wide else _KERNELS[tiling.weight.activations]).body, tiling=tiling),
            name=epilogue.name_of_many,
            grid=tiling.grid,
            inputs=inputs,
            state=state if onto is None else PlainRows(values=onto),
            simulate=simulate,
        )
        return epilogue.finished(made, tiling.rows)
