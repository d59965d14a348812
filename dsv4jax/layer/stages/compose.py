"""Which stages serve a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from dsv4jax.cache.pool import PooledLayer
from dsv4jax.checks import known_size
from dsv4jax.formats import KeyRows
from dsv4jax.indexing import quotient
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import OpBackends
from dsv4jax.layer.indexer import Selection, ordered_picks
from dsv4jax.layer.ops import (
    CACHE_UPDATE,
    DECODE_ATTENTION,
    PROJECTIONS,
    AttentionInputs,
    DecodeAttention,
    RowForm,
    Rows,
)
from dsv4jax.layer.stages.interface import Intake, Latents, Output, QueryStage
from dsv4jax.layer.stages.probe import Probe, Seen
from dsv4jax.layer.stages.steps import IntakeSteps, OutputSteps, QuerySteps
from dsv4jax.plan import CachePlan
from dsv4jax.rope import rope_frequencies
from dsv4jax.weights.params import AttentionParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedStages:
    """The stages in which one backend fuses several ops. Each is made of the same stage step by step."""

    intake: Callable[[IntakeSteps], Intake]  # if products and cache update have this backend
    queries: Callable[[QuerySteps], QueryStage]  # if products and attention have it, and scores if there are any
    output: Callable[[OutputSteps, tuple[RowForm, ...]], Output]  # with the forms that attention can give


FUSED: dict[str, FusedStages] = {}  # by the name of the backend


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The five stages of a layer."""

    intake: Intake
    queries: QueryStage
    selection: Selection | None  # of a layer with an indexer
    attention: DecodeAttention
    output: Output
    plan: CachePlan
    kind: AttentionType

    @classmethod
    def of(cls, backends: OpBackends, plan: CachePlan, kind: AttentionType) -> Stages:
        """Compose the stages of a kind of layer from a backend for each of its ops."""
        projections = PROJECTIONS.of(backends, plan, kind)
        cache_update, attention = CACHE_UPDATE.of(backends, plan, kind), DECODE_ATTENTION.of(backends, plan, kind)
        selection = Selection.of(backends, plan) if kind.is_indexed else None
        intake: Intake = (intake_steps := IntakeSteps(projections, cache_update))
        scores = None if selection is None else selection.scores
        query_steps = QuerySteps(projections=projections, attention=attention, scores=scores, plan=plan, kind=kind)
        queries: QueryStage = query_steps
        output: Output = (output_steps := OutputSteps(projections, plan))
        backend = backends.projections
        if (fused := FUSED.get(str(backend))) is not None:
            output = fused.output(output_steps, attention.forms)
            if backends.cache_update == backend:
                intake = fused.intake(intake_steps)
            if backends.decode_attention == backend and backends.indexer_scores in (None, backend):
                queries = fused.queries(query_steps)
        return cls(
            intake=intake,
            queries=queries,
            selection=selection,
            attention=attention,
            output=output,
            plan=plan,
            kind=kind,
        )

    def pick(
        self,
        keys: jax.Array | KeyRows | None,
        latents: Latents,
        entries: PooledLayer | None,
        probe: Probe,
        seen: Seen,
    ) -> jax.Array | None:
        """Return the entries that each query reads, int32 [B, T, K], -1 = none; None if it reads all that it sees."""
        if self.selection is None or keys is None or latents.head_weights is None or entries is None:
            return None
        visible = quotient(latents.positions + 1, self.plan.cfg.ratio(self.kind))
        if probe.entries is None:
            picks = self.selection.pick(keys, latents.head_weights, entries, visible)
        else:
            picks = ordered_picks(probe.entries, visible)
        picks = probe.tap("picks", picks, seen)
        return ordered_picks(picks, visible) if probe.patched("picks") else picks

    def attend(self, inputs: AttentionInputs, latents: Latents, form: RowForm) -> Rows:
        """Return rows in a form that attention can give, of values in the dtype of the latents; 0 on padding."""
        freqs, needed = rope_frequencies(self.plan.cfg, self.kind), latents.positions >= 0
        return self.attention.attend(inputs, freqs, latents.rows.dtype, needed, form)

    def tile(self, params: AttentionParams, batch: int, tokens: int) -> int:
        """Return the tokens of a tile of queries, of ``tokens`` for each of ``batch`` requests.

        It is all of them or the power of two that keeps what is computed on the way within ``tile_bytes`` of attention.
        """
        batch = known_size(batch, self.plan.max_requests)  # rows name distinct slots
        of_queries = self.queries.token_bytes(params, batch * tokens)
        of_token = max(of_queries, self.attention.token_bytes(self.plan, self.kind))
        most = self.attention.tile_bytes // (of_token * batch)
        return min(tokens, 1 << max(0, most.bit_length() - 1))
