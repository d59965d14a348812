"""The kernels of a model around its layers, at its sizes, for ``compiled_kernels``: router and hyper-connections."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import dsv4jax as d4
import pallas_kernels as pk
from pallas_kernels.router import call as router_call
from tests.support.compiled_products import Spec, f32
from tests.support.kernel_report import Kernel


def model_kernels(cfg: d4.DSV4Config, experts: int) -> Iterator[Kernel]:
    """Yield the kernels of a model with so many experts."""
    yield from _router(cfg, experts)
    yield from _mixed_streams(cfg)


def _router(cfg: d4.DSV4Config, experts: int) -> Iterator[Kernel]:
    """Yield the router of few tokens, and what picks and sorts for many."""

    def args(tokens: int) -> tuple[Any, Any]:
        real, bias = Spec((tokens,), jnp.bool), f32(experts)
        return Spec((tokens, cfg.hidden_size), jnp.bfloat16), pk.PickInputs(real=real, bias=bias)

    def of(tokens: int) -> Any:
        rows = pk.tile_rows(tokens, 6, experts)
        return router_call.Router(tokens=tokens, experts=experts, picks=6, scale=1.5, rows=rows, simulate=False)

    gate = Spec((experts, cfg.hidden_size), jnp.bfloat16)
    options: dict[str, Any] = dict(rows=None, reads_only=True, has_scratch=True)
    for tokens in (1, 64):

        def route(gate: Any, x: Any, inputs: Any) -> Any:
            return pk.route(x, gate, inputs, picks=6, scale=1.5)

        yield Kernel(name=f"router [{tokens}]", function=route, args=(gate, *args(tokens)), **options)
    many = of(4096)
    yield Kernel(name="router_picks [4096]", function=many.pick, args=(f32(4096, experts), args(4096)[1]), **options)
    yield Kernel(name="router_tiles [4096]", function=many.sort, args=(Spec((4096, 6), jnp.int32),), **options)


def _mixed_streams(cfg: d4.DSV4Config) -> Iterator[Kernel]:
    """Yield hyper-connections of few tokens and of many, after each kind of sublayer, and those of a model's ends."""
    hidden, n = cfg.hidden_size, 4
    rules = pk.MixRules(rounds=20, eps=1e-6, norm_eps=cfg.norm_eps)

    def bf16(*shape: int) -> Any:
        return Spec(shape, jnp.bfloat16)

    def mix(streams: Any, weights: Any, ended: Any) -> Any:
        return pk.mix_streams(streams, weights, ended, rules=rules)

    for name, tokens, numbers in (
        ("attention", 1, 24),
        ("attention", 4096, 24),
        ("experts", 1, 24),
        ("experts", 4096, 24),
        ("nothing", 4096, 24),
        ("experts", 64, n),
    ):
        weights = pk.StreamWeights(
            weight=f32(numbers, n * hidden), base=f32(numbers), scale=f32(3 if numbers > n else 1), norm=bf16(hidden)
        )
        experts: dict[str, Any] = {}
        if name == "experts":
            experts = dict(routed=bf16(1, tokens, 6, hidden), experts=Spec((tokens, 6), jnp.int32), num_experts=256)
        ended = pk.EndedSublayer(post=f32(tokens, n), carry=f32(tokens, n, n), output=bf16(tokens, hidden), **experts)
        args = bf16(tokens, n, hidden), weights, None if name == "nothing" else ended
        options: dict[str, Any] = dict(rows=None, reads_only=True, has_scratch=True)
        yield Kernel(name=f"mix_streams {name} {numbers} [{tokens}]", function=mix, args=args, **options)
