"""The stage of a layer that makes its output, with kernels that take rows as attention's kernel gives them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.layer.kernels.base import form_options
from dsv4jax.layer.kernels.products import ProjectionsKernels, flat, row_form, weight_form
from dsv4jax.layer.ops import PROJECTIONS, RowForm, Rows
from dsv4jax.layer.stages.interface import Ending, Latents
from dsv4jax.layer.stages.steps import OutputSteps
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import StoredWeight


@dataclasses.dataclass(frozen=True, slots=True)
class OutputKernels:
    """Products with weights that are stored as FP8. The last one adds the residual. Others are made step by step."""

    kernels: ProjectionsKernels
    steps: OutputSteps
    forms: tuple[RowForm, ...]  # that attention can give

    def takes(self, params: AttentionParams, latents: Latents) -> RowForm:
        form = self._form(params, latents.positions.size)
        return form if form in self.forms and latents.rows.dtype == jnp.bfloat16 else "plain"

    def _form(self, params: AttentionParams, tokens: int) -> RowForm:
        return row_form(params.o_a, tokens, self.steps.plan.cfg.o_groups)

    def narrow(self, params: AttentionParams, rows: Rows, positions: jax.Array, tokens: int) -> Rows:
        if isinstance(rows, jax.Array):
            return self.steps.narrow(params, rows, positions, tokens)
        assert isinstance(params.o_a, StoredWeight)
        form = self._form(params, positions.size)
        # Products give rows in the form that they take, or plain ones. Rows of several tiles are plain.
        is_kept = positions.size == tokens and row_form(params.o_b, tokens) == form
        options = form_options(form if is_kept else "plain", jnp.bfloat16)
        groups = self.steps.plan.cfg.o_groups
        narrow = self.kernels.product(rows, params.o_a, groups, needed=positions >= 0, **options)
        return narrow if is_kept else narrow.reshape(*positions.shape, -1)

    def finish(self, params: AttentionParams, rows: Rows, ending: Ending) -> jax.Array:
        weight, positions, bf16 = params.o_b, ending.positions, jnp.bfloat16
        if isinstance(rows, jax.Array):
            rows = rows.astype(ending.dtype)
        if not isinstance(weight, StoredWeight) or ending.dtype != bf16:
            return self.steps.finish(params, rows, ending)
        if pk.unsupported_product(weight.shape, weight_form(weight), positions.size) is not None:
            return self.steps.finish(params, rows, ending)
        residual = None
        if ending.residual is not None and ending.is_whole:
            kept = self.kernels.without_derivative(PROJECTIONS, ending.residual)
            residual = pk.Residual(rows=flat(kept), positions=positions.reshape(-1))
        dtype = bf16 if ending.axis is None else jnp.float32
        y = self.kernels.product(rows, weight, needed=positions >= 0, dtype=dtype, residual=residual)
        y = y.reshape(*positions.shape, -1)
        return ending.end(y) if residual is None else y
