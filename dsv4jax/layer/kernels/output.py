"""The stage of a layer that makes its output, with kernels that take rows as attention's kernel gives them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.layer.kernels.products import ProjectionsKernels, flat, of_kernels
from dsv4jax.layer.ops import PROJECTIONS, RowForm, Rows
from dsv4jax.layer.stages.interface import Ending, Latents
from dsv4jax.layer.stages.steps import OutputSteps
from dsv4jax.weights.params import AttentionParams


@dataclasses.dataclass(frozen=True, slots=True)
class OutputKernels:
    """Products with weights that are stored as FP8. The last one adds the residual. Others are made step by step."""

    steps: OutputSteps
    forms: tuple[RowForm, ...]  # that attention can give

    @property
    def products(self) -> ProjectionsKernels:
        return of_kernels(self.steps.projections)

    def takes(self, params: AttentionParams, latents: Latents) -> RowForm:
        form = self._form(params, latents.positions.size)
        return form if form in self.forms and latents.rows.dtype == jnp.bfloat16 else "plain"

    def _form(self, params: AttentionParams, tokens: int) -> RowForm:
        return self.products.row_form(params.o_a, tokens, self.steps.plan.cfg.o_groups)

    def narrow(self, params: AttentionParams, rows: Rows, positions: jax.Array, tokens: int) -> Rows:
        if isinstance(rows, jax.Array):
            return self.steps.narrow(params, rows, positions, tokens)
        # Products give rows in the form that they take, or plain ones. Rows of several tiles are plain.
        given, taken = self._form(params, positions.size), self.products.row_form(params.o_b, tokens)
        is_kept = positions.size == tokens and taken == given
        made = pk.Store(kind=type(rows)) if is_kept else pk.Store(dtype=jnp.bfloat16)
        weights, groups, real = (params.o_a,), self.steps.plan.cfg.o_groups, positions >= 0
        plan = self.products.plan(rows, weights, (made,), groups, needed=real)
        (narrow,) = self.products.run(plan, rows, weights, needed=real)
        return narrow if is_kept else narrow.reshape(*positions.shape, -1)

    def finish(self, params: AttentionParams, rows: Rows, ending: Ending) -> jax.Array:
        weights, positions, real = (params.o_b,), ending.positions, ending.positions >= 0
        if isinstance(rows, jax.Array):
            rows = rows.astype(ending.dtype)
        made = pk.AddTo() if ending.axis is None else pk.Store()
        plan = self.products.plan(rows, weights, (made,), needed=real)
        if isinstance(plan, pk.Unsupported):
            return self.steps.finish(params, rows, ending)
        if ending.axis is not None:
            (y,) = self.products.run(plan, rows, weights, needed=real)
            return ending.end(y.reshape(*positions.shape, -1))
        # The kernel leaves padding as it is. Without a residual it therefore adds to zeros, which all layers of a
        # program share, where a mask would be one more launch in each.
        onto = ending.residual
        if onto is None:
            onto = jnp.zeros((len(positions), ending.num_tokens, params.o_b.shape[0]), jnp.bfloat16)
        beyond = positions.shape[1] - ending.num_tokens
        onto = jnp.pad(onto, ((0, 0), (0, beyond), (0, 0)))
        extras = flat(self.products.without_derivative(PROJECTIONS, onto)), positions.reshape(-1)
        (y,) = self.products.run(plan, rows, weights, *extras, needed=real)
        return y.reshape(*positions.shape, -1)[:, : ending.num_tokens]
