"""Stages that kernels fuse give what the same stages give step by step, and take the launches that they should."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS, KeyRows
from dsv4jax.layer.backend import SIMULATED, XLA
from dsv4jax.layer.ops import DECODE_ATTENTION, INDEXER_SCORES, PROJECTIONS, choose_backends
from dsv4jax.layer.stages.compose import FUSED, Stages
from dsv4jax.layer.stages.interface import Latents, Queries
from dsv4jax.layer.stages.steps import QuerySteps
from pallas_kernels.language import target
from tests.support.cases import first_of
from tests.support.stored import random_stored

CSA, HCA = d4.AttentionType.CSA, d4.AttentionType.HCA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Latents of some tokens, and the weights that queries are made of."""

    kind: d4.AttentionType = CSA
    batch: int = 1
    tokens: int = 66
    activations: str = "bf16"
    dtype: str = "bfloat16"
    is_wide: bool = False
    heads: int = 2

    def queries(self, backend: str) -> Queries:
        cfg = dataclasses.replace(
            d4.DSV4Config.flash(), num_heads=self.heads, o_groups=1, indexer_heads=2, q_lora_rank=128
        )
        plan = d4.plan_cache(cfg, max_requests=2, max_context=2048, indexer_format="mxfp4")
        # Composed here, since ``Stages.of`` refuses heads that are too few for the kernel of attention.
        steps = QuerySteps(
            projections=PROJECTIONS[backend],
            attention=DECODE_ATTENTION[backend],
            scores=INDEXER_SCORES[backend],
            plan=plan,
            kind=self.kind,
        )
        rng = np.random.default_rng(1)
        rows = jnp.asarray(rng.standard_normal((self.batch, self.tokens, 128)), self.dtype)
        positions = np.arange(1000, 1000 + self.tokens, dtype=np.int32) + np.zeros((self.batch, 1), np.int32)
        positions[-1, -1] = -1
        weights = [random_stored(seed, shape, activations=self.activations) for seed, shape in self.shapes]
        if self.is_wide:
            weights = [weight.widened(jnp.bfloat16) for weight in weights]
        params = jax.eval_shape(lambda: d4.init_attention_params(jax.random.key(0), cfg, 2 if self.kind == CSA else 3))
        latents = Latents(rows=rows, positions=jnp.asarray(positions), head_weights=None)
        stage = steps if backend == XLA else FUSED[backend].queries(steps)

        @jax.jit
        def make(latents: Latents, q_b: Any, index_q_b: Any) -> Queries:
            return stage.make(dataclasses.replace(params, q_b=q_b, index_q_b=index_q_b), latents)

        return make(latents, weights[0], weights[1] if self.kind == CSA else None)

    @property
    def shapes(self) -> list[tuple[int, tuple[int, int]]]:
        return [(1, (512 * self.heads, 128)), (2, (256, 128))]


@pytest.fixture
def launched(monkeypatch) -> set[str]:
    """What products have made since: the names of their epilogues, of each launch."""
    names: set[str] = set()
    solve = pk.run

    def recorded(plan: pk.Plan, *args, **options):
        names.add(" and ".join(type(made).__name__ for made in plan.problem.epilogues))
        return solve(plan, *args, **options)

    monkeypatch.setattr(pk, "run", recorded)
    return names


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("case", "expected"),
    first_of(
        [
            pytest.param(Case(batch=2, tokens=2), {"AttentionQueries and IndexerQueries"}, id="both in one launch"),
            pytest.param(Case(kind=HCA, tokens=3), {"AttentionQueries"}, id="attention's of few rows"),
            pytest.param(
                Case(tokens=66, activations="fp8", heads=8),
                {"AttentionQueries", "IndexerQueries"},
                id="a launch each of many rounded rows",
            ),
            pytest.param(Case(tokens=66), {"Store"}, id="many rows of bf16"),
            pytest.param(Case(tokens=2, dtype="float32"), set(), id="latents of f32"),
            pytest.param(Case(tokens=2, is_wide=True), {"Store"}, id="wide weights"),
        ],
        count=3,
    ),
)
def test_queries_are_those_of_the_steps(case, expected, launched, monkeypatch):
    if case.tokens < 64:  # a card so small that products of these few heads have whole heads in a block
        small = dataclasses.replace(target.gpu_or_first(), multiprocessors=3, clusters={2: 1})
        monkeypatch.setattr(target, "gpu_or_first", lambda: small)
    want = case.queries(XLA)
    assert launched == set()
    got = case.queries(SIMULATED)
    assert launched == expected
    assert got.q.shape == want.q.shape == (case.batch, case.tokens, case.heads, 512)
    real = np.arange(case.batch * case.tokens) < case.batch * case.tokens - 1
    # f16, and the products' own sums are in another order: some 2^-20 of the largest, which are below 8.
    ours, theirs = (np.float32(made.q).reshape(real.size, -1)[real] for made in (got, want))
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-10, atol=2.0**-15)
    assert (got.keys is None) == (want.keys is None) == (case.kind is HCA)
    if case.kind is CSA:
        keys = INDEXER_FORMATS["mxfp4"]
        encode, decode = jax.jit(keys.encode), jax.jit(keys.decode)
        rows = [made if isinstance(made, KeyRows) else encode(made) for made in (got.keys, want.keys)]
        ours, theirs = (np.float32(decode(row)).reshape(real.size, -1)[real] for row in rows)
        # The sums are in another order, so that a value may round to the one beside it.
        assert np.mean(ours != theirs) < 1e-3


@pytest.mark.parametrize(("dtype", "tokens", "expected"), [("bfloat16", 8, "operand"), ("float32", 8, "plain")])
def test_attention_is_asked_for_rows_that_the_output_takes(dtype, tokens, expected):
    cfg = d4.DSV4Config.flash()
    plan = d4.plan_cache(cfg, max_requests=1, max_context=256)
    params = jax.eval_shape(lambda: d4.init_attention_params(jax.random.key(0), cfg, 3, weights="stored"))
    rows, positions = jnp.zeros((1, tokens, cfg.q_lora_rank), dtype), jnp.zeros((1, tokens), jnp.int32)
    latents = Latents(rows=rows, positions=positions, head_weights=None)
    found = {name: Stages.of(choose_backends(name, plan, HCA), plan, HCA).output for name in (SIMULATED, XLA)}
    assert found[SIMULATED].takes(params, latents) == expected
    assert found[XLA].takes(params, latents) == "plain"


@pytest.mark.parametrize("kind", [CSA, HCA])
def test_stages_are_fused_only_where_ops_have_one_backend(kind):
    plan = d4.plan_cache(d4.DSV4Config.flash(), max_requests=1, max_context=256, indexer_format="mxfp4")

    def stages(**names: str) -> list[str]:
        simulated = (op for op, known in d4.backends().items() if SIMULATED in known)
        named: dict[str, Any] = {op: names.get(op, SIMULATED) for op in simulated}
        backends = choose_backends(d4.OpBackends(**named), plan, kind)
        found = Stages.of(backends, plan, kind)
        return [type(stage).__name__ for stage in (found.intake, found.queries, found.output)]

    assert stages() == ["IntakeKernels", "QueryKernels", "OutputKernels"]
    assert stages(projections="xla") == ["IntakeSteps", "QuerySteps", "OutputSteps"]
    assert stages(cache_update="xla") == ["IntakeSteps", "QueryKernels", "OutputKernels"]
    assert stages(decode_attention="xla") == ["IntakeKernels", "QuerySteps", "OutputKernels"]
    of_queries = "QuerySteps" if kind is CSA else "QueryKernels"
    assert stages(indexer_scores="xla") == ["IntakeKernels", of_queries, "OutputKernels"]
