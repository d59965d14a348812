"""The launches of a product with experts, on Hopper: one for each size of tiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels.activations import PlainRows, RoundedExpertRows
from pallas_kernels.language.launch import launch
from pallas_kernels.products.experts import fp8, sm90
from pallas_kernels.products.experts.layout import Layout
from pallas_kernels.products.experts.rows import expert_rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OfExperts:
    """One product."""

    layouts: tuple[Layout, ...]  # of its launches

    def launch(
        self,
        x: Any,
        weights: list[tuple[Any, ...]],
        extras: dict[str, Any],
        needed: jax.Array | None,
        *,
        simulate: bool,
    ) -> list[Any]:
        """Return what is made of the product."""
        assert needed is None, "padding is in no tile"
        inputs = self.inputs_of(x, weights[0], extras, simulate=simulate)
        return [self.layouts[0].epilogue.finished(self.launch_product(inputs, simulate=simulate), x.shape[0])]

    def inputs_of(
        self, x: Any, weight: tuple[Any, ...], extras: dict[str, Any], *, simulate: bool
    ) -> sm90.ExpertInputs:
        """Return the arrays of the product, with rows that a launch of their own sorts or rounds if it takes such."""
        (codes, scales), layout = weight, self.layouts[0]
        if isinstance(x, PlainRows) and (layout.sorts or layout.is_rounded):
            routing, pairs = layout.epilogue.routing, extras["pairs"] if layout.sorts else None
            x = expert_rows(x, routing.row_kind, pairs, routing.picks, simulate=simulate)
        rows, x_scales = (x.codes, x.scales) if isinstance(x, RoundedExpertRows) else (x.values, None)
        return sm90.ExpertInputs(
            x=rows,
            x_scales=x_scales,
            codes=codes.reshape(-1, codes.shape[-1]),
            scales=scales.reshape(-1, scales.shape[-1]),
            pairs=extras["pairs"],
            tiles=extras["tiles"],
            count=extras["count"],
            weights=extras.get("weights"),
        )

    def launch_product(self, inputs: sm90.ExpertInputs, *, simulate: bool = False) -> Any:
        """Launch the product alone, for rows that are rounded if the product takes such rows."""
        first = self.layouts[0]
        made = first.epilogue.state(first.epilogue.x_rows, first.weight.outputs)
        for layout in self.layouts:
            made = launch(
                functools.partial(fp8.body if layout.is_rounded else sm90.body, layout=layout),
                name=layout.epilogue.name,
                grid=layout.grid,
                inputs=inputs,
                state=made,
                simulate=simulate,
            )
        return made
