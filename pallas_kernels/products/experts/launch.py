"""The launch of a product with experts, on Hopper."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels.language.launch import launch
from pallas_kernels.products.experts import sm90
from pallas_kernels.products.experts.layout import Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OfExperts:
    """A launch of one product."""

    layout: Layout

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
        layout, ((codes, scales),), epilogue = self.layout, weights, self.layout.epilogue
        assert needed is None, "padding is in no tile"
        inputs = sm90.ExpertInputs(
            x=x.values,
            codes=codes.reshape(-1, codes.shape[-1]),
            scales=scales.reshape(-1, scales.shape[-1]),
            pairs=extras["pairs"],
            tiles=extras["tiles"],
            count=extras["count"],
            weights=extras.get("weights"),
        )
        made = launch(
            functools.partial(sm90.body, layout=layout),
            name=epilogue.name,
            grid=layout.grid,
            inputs=inputs,
            state=epilogue.state(x.shape[0], layout.weight.outputs),
            simulate=simulate,
        )
        return [epilogue.finished(made, x.shape[0])]
