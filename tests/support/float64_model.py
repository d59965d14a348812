"""The whole model over one sequence in NumPy and float64, and so an oracle of gradients.

It shares with the library the trees of weights and the frequencies of ropes, and no formula.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.config import layer_kind
from dsv4jax.model import ModelConfig, ModelParams, StoredExperts
from dsv4jax.rope import rope_frequencies
from dsv4jax.weights import StoredWeight, WeightWithDelta

type Array = np.ndarray


def widened64(params: Any) -> Any:
    """Weights as float64, those that are stored times their scales, with their deltas added: all of it exact."""

    def wide(node: Any) -> Array:
        if isinstance(node, WeightWithDelta):
            total = wide(node.base).copy()
            for delta in node.deltas:
                up, down = np.asarray(delta.up, np.float64), np.asarray(delta.down, np.float64)
                total[..., delta.first : delta.first + delta.rows, :] += delta.alpha / delta.rank * (up @ down)
            return total
        if isinstance(node, StoredExperts):
            node = node.widened(jnp.arange(node.shape[0], dtype=jnp.int32), jnp.float32)
        elif isinstance(node, StoredWeight):
            node = node.widened(jnp.float32)
        array = np.asarray(node)
        return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64)

    classes = WeightWithDelta, StoredExperts, StoredWeight
    return jax.tree.map(wide, params, is_leaf=lambda node: isinstance(node, classes))


def logits64(params: ModelParams, ids: Array) -> Array:
    """Return logits float64 [T, V] of ids [T]; the weights are of ``widened64``."""
    cfg = params.cfg
    streams = np.repeat(np.asarray(params.embedding)[ids][:, None], cfg.num_streams, axis=1)
    for layer, block in enumerate(params.blocks):
        x, post, carry = _mixed(streams, block.attention_mix, cfg)
        y = _attention(block.attention, _norm(x, cfg, block.attention_norm), cfg, layer)
        streams = post[:, :, None] * y[:, None] + np.einsum("tjl,tjh->tlh", carry, streams)
        x, post, carry = _mixed(streams, block.experts_mix, cfg)
        y = _experts(_norm(x, cfg, block.experts_norm), ids, block, cfg)
        streams = post[:, :, None] * y[:, None] + np.einsum("tjl,tjh->tlh", carry, streams)
    numbers = _numbers(streams, params.final_mix, cfg)
    pre = _sigmoid(numbers * params.final_mix.scale[0] + params.final_mix.base) + cfg.hyper_eps
    return _norm(np.einsum("tj,tjh->th", pre, streams), cfg, params.final_norm) @ np.asarray(params.head).T


def cross_entropy64(params: ModelParams, ids: Array) -> float:
    """The mean cross entropy of the next tokens."""
    logits = logits64(params, ids)[:-1]
    peak = logits.max(axis=1)
    total = np.log(np.exp(logits - peak[:, None]).sum(axis=1)) + peak
    return float(np.mean(total - logits[np.arange(len(ids) - 1), ids[1:]]))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _norm(x: Array, cfg: ModelConfig, weight: Any = 1.0) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + cfg.norm_eps) * np.asarray(weight)


def _numbers(streams: Array, mix: Any, cfg: ModelConfig) -> Array:
    return _norm(streams.reshape(len(streams), -1), cfg) @ mix.weight.T


def _mixed(streams: Array, mix: Any, cfg: ModelConfig) -> tuple[Array, Array, Array]:
    """A sublayer's input before its norm, and the gains around it."""
    n = cfg.num_streams
    m = _numbers(streams, mix, cfg)
    pre = _sigmoid(m[:, :n] * mix.scale[0] + mix.base[:n]) + cfg.hyper_eps
    post = 2 * _sigmoid(m[:, n : 2 * n] * mix.scale[1] + mix.base[n : 2 * n])
    carry = np.exp((m[:, 2 * n :] * mix.scale[2] + mix.base[2 * n :]).reshape(-1, n, n))
    carry = carry / carry.sum(axis=2, keepdims=True) + cfg.hyper_eps
    carry /= carry.sum(axis=1, keepdims=True) + cfg.hyper_eps
    for _ in range(cfg.sinkhorn_iterations - 1):
        carry /= carry.sum(axis=2, keepdims=True) + cfg.hyper_eps
        carry /= carry.sum(axis=1, keepdims=True) + cfg.hyper_eps
    return np.einsum("tj,tjh->th", pre, streams), post, carry


def _experts(x: Array, ids: Array, block: Any, cfg: ModelConfig) -> Array:
    scores = np.sqrt(np.log1p(np.exp(x @ block.router.gate.T)))

    def expert(x: Array, gate_up: Array, down: Array) -> Array:
        gate, up = np.split(gate_up @ x, 2)
        if cfg.swiglu_limit > 0:
            gate, up = np.minimum(gate, cfg.swiglu_limit), np.clip(up, -cfg.swiglu_limit, cfg.swiglu_limit)
        return down @ (_silu(gate) * up)

    rows = []
    for token, of_token in enumerate(scores):
        if block.router.table is not None:
            picks = block.router.table[ids[token]]
        else:
            picks = np.argsort(-(of_token + block.router.bias), kind="stable")[: cfg.experts_per_token]
        weights = of_token[picks] / of_token[picks].sum() * cfg.routed_scale
        total = expert(x[token], block.experts.shared_gate_up, block.experts.shared_down)
        for pick, weight in zip(picks, weights, strict=True):
            total = total + weight * expert(x[token], block.experts.gate_up[pick], block.experts.down[pick])
        rows.append(total)
    return np.stack(rows)


def _attention(params: Any, x: Array, model: ModelConfig, layer: int) -> Array:
    cfg, kind, length = model.attention, layer_kind(model.attention, layer), len(x)
    freqs = rope_frequencies(cfg, kind)

    def turned(rows: Array, positions: Array, sign: int = 1) -> Array:
        """Rows [n, ..., dim], of whose last dims pairs are turned, as complex numbers."""
        angle = (positions.astype(np.float32)[:, None] * freqs[None]).astype(np.float64)
        turn = np.exp(1j * sign * angle).reshape(-1, *(1,) * (rows.ndim - 2), len(freqs))
        kept, pairs = rows[..., : -2 * len(freqs)], rows[..., -2 * len(freqs) :]
        both = (pairs[..., 0::2] + 1j * pairs[..., 1::2]) * turn
        return np.concatenate([kept, np.stack([both.real, both.imag], axis=-1).reshape(pairs.shape)], axis=-1)

    def entries_of(compressor: Any) -> Array:
        ratio, found = cfg.ratio(kind), []
        k, z = x @ compressor.kv.T, x @ compressor.gate.T
        dim = compressor.norm.shape[0]
        for i in range(length // ratio):
            own = slice(i * ratio, (i + 1) * ratio)
            parts = [(k[own, -dim:], z[own, -dim:] + compressor.ape[:, -dim:])]
            if kind.overlaps and i:
                before = slice((i - 1) * ratio, i * ratio)
                parts.append((k[before, :dim], z[before, :dim] + compressor.ape[:, :dim]))
            keys, gates = (np.concatenate(each) for each in zip(*parts, strict=True))
            gates = np.exp(gates - gates.max(axis=0))
            pooled = (gates / gates.sum(axis=0) * keys).sum(axis=0)
            found.append(turned(_norm(pooled, model, compressor.norm)[None], np.array([i * ratio])))
        return np.concatenate(found)

    positions = np.arange(length)
    latent = _norm(x @ params.q_a.T, model, params.q_norm)
    q = turned(_norm((latent @ params.q_b.T).reshape(length, cfg.num_heads, -1), model), positions)
    keys = turned(_norm(x @ params.kv.T, model, params.kv_norm), positions)
    age = positions[:, None] - positions
    mask = (age >= 0) & (age < cfg.sliding_window)
    if kind.compresses:
        entries = entries_of(params.compressor)
        seen = np.arange(len(entries)) < ((positions + 1) // cfg.ratio(kind))[:, None]
        if kind.is_indexed and len(entries) > cfg.indexer_top_k:
            of_entries, iq = entries_of(params.indexer.compressor), latent @ params.indexer.q_b.T
            iq = turned(iq.reshape(length, cfg.indexer_heads, -1), positions)  # one Hadamard matrix in both: left out
            dots = np.maximum(np.einsum("thd,sd->ths", iq, of_entries), 0)
            scores = np.einsum("th,ths->ts", x @ params.indexer.head_weights.T, dots)
            best = np.argsort(-np.where(seen, scores, -np.inf), axis=1, kind="stable")[:, : cfg.indexer_top_k]
            picked = np.zeros_like(seen)
            np.put_along_axis(picked, best, values=True, axis=1)
            seen &= picked
        keys, mask = np.concatenate([keys, entries]), np.concatenate([mask, seen], axis=1)
    logits = np.einsum("thd,kd->thk", q, keys) * cfg.head_dim**-0.5
    weights = np.exp(logits) * mask[:, None]
    weights /= weights.sum(axis=2, keepdims=True) + np.exp(params.sinks)[:, None]
    out = turned(np.einsum("thk,kd->thd", weights, keys), positions, sign=-1).reshape(length, cfg.o_groups, -1)
    narrow = np.einsum("tgi,goi->tgo", out, params.o_a.reshape(cfg.o_groups, cfg.o_lora_rank, -1))
    return narrow.reshape(length, -1) @ params.o_b.T
