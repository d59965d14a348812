"""How long a decode step takes on a mesh: added up from recorded parts, not measured.

What ``dsv4jax.model.inside.devices`` says is computed and sent, at what the parts were measured to take:

- Attention: a layer with its products on an H200, of the requests of a shard with 32K tokens each; from 256 on 16K.
  A layer with a window alone counts as HCA.
- Experts: those of the layer of the device that has most of them, of picks drawn at random; all other parts of a layer,
  and the head: on an H200, too.
- What is sent: by the bytes that a device receives, as between two H100 of a host, by NCCL.

Assumed are three things. A host has eight GPUs, between any of which bytes take as long as between two. From host to
host there are ``HOST_BYTES`` of a GPU in a microsecond, and ``HOST_LATENCY`` before the first. And V4-Pro's parts take
as much longer than V4-Flash's as they have more bytes. Launches are not counted, nor what overlaps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from benchmarks.kernels.lines import Line, Results
from benchmarks.kernels.tables import table
from dsv4jax.model import ModelConfig, plan_memory

DEVICES = (1, 2, 4, 8, 16, 32, 64)
REQUESTS = (1, 64, 256)
HOST = 8  # GPUs
HOST_BYTES = 50_000  # a microsecond: 400 Gbit/s
HOST_LATENCY = 20.0  # us
DEVICE_BYTES = 139 << 30  # of an H200
GAIN = 1.1  # of twice the devices, below which they do not pay
FLASH = ModelConfig.flash()
DATA, MODEL = 0, 1  # axes of a mesh


class Parts:
    """The recorded times of V4-Flash's parts in us, and of other sizes by their bytes."""

    def __init__(self, results: Results) -> None:
        self._found = {line["case"]: line for line in (*results.layers, *results.model, *results.by_hand)}

    def attention(self, kind: str, requests: int) -> float:
        contexts = {1: 32768, 8: 32768, 64: 32768, 256: 16384}
        cases = {count: f"layer {kind} B{count} {context} stored bf16" for count, context in contexts.items()}
        return self._between(requests, cases)

    def beside(self, requests: int) -> float:
        """A layer's shared expert, router and hyper-connections."""
        counts = {
            "shared expert {} tokens": (1, 8, 64, 256),
            "router {} tokens, bias": (1, 8, 64, 128, 1024),
            "pallas after attention {} tokens": (1, 8, 64, 256),
            "pallas after experts {} tokens": (1, 8, 64),
        }
        return sum(self._between(requests, {n: case.format(n) for n in of}) for case, of in counts.items())

    def experts(self, touched: float) -> float:
        """The routed experts of a layer, of which so many are read."""
        counts = (1, 2, 8, 64, 256)
        return self._between(touched, {_touched(FLASH, n, 1): f"experts bf16 {n} tokens" for n in counts})

    def head(self, requests: int) -> float:
        return self._between(requests, {n: f"head {n} tokens" for n in (1, 8, 64)})

    def received(self, size: float) -> float:
        """A sum of which each of two GPUs receives so many bytes, as for tokens x 4,096 in bf16."""
        return self._between(size, {n * 2 * 4096: f"sum of {n} tokens over 2 GPUs" for n in (1, 8, 64, 256, 4096)})

    def _between(self, size: float, cases: Mapping[int, str] | Mapping[float, str]) -> float:
        """A time on the line through the nearest two sizes; beyond the last one, that of the last."""
        sizes, times = list(cases), [_us(self._found[case]) for case in cases.values()]
        if size < sizes[0]:
            return times[0] - (times[1] - times[0]) / (sizes[1] - sizes[0]) * (sizes[0] - size)
        return float(np.interp(size, sizes, times))


def _us(line: Line) -> float:
    if isinstance(line.get("us"), dict):
        return line["us"]["median"]
    return next(line[name] for name in ("us", "median", "microseconds") if name in line)


_memory = functools.cache(plan_memory)


@functools.cache
def _touched(cfg: ModelConfig, tokens: int, devices: int) -> float:
    """How many experts of a layer the busiest of some devices reads for the picks of tokens, on average."""
    rng = np.random.default_rng(0)
    most = []
    for _ in range(30):
        picks = rng.random((tokens, cfg.num_experts)).argpartition(cfg.experts_per_token)[:, : cfg.experts_per_token]
        most.append(np.bincount(np.unique(picks) // (cfg.num_experts // devices), minlength=devices).max())
    return float(np.mean(most))


def step_time(parts: Parts, cfg: ModelConfig, shape: tuple[int, int], requests: int) -> float:
    """Return the us of a decode step of so many requests on a mesh data x model. ``requests`` divide by data."""
    (data, model), layers = shape, cfg.num_layers
    own, devices = requests // data, data * model
    plan, flash = _memory(cfg), _memory(FLASH)
    of_rest = (plan.other / layers) / (flash.other / FLASH.num_layers)
    of_expert = cfg.hidden_size * cfg.expert_width / (FLASH.hidden_size * FLASH.expert_width)
    kinds = ["csa" if ratio == 4 else "hca" for ratio in cfg.attention.compress_ratios[:layers]]

    def sent(axis: int, size: float) -> float:
        """Over an axis that has so many bytes in all, of which a device receives those of the others."""
        if shape[axis] == 1:
            return 0.0
        received = size * (shape[axis] - 1) / shape[axis]
        is_far = (devices if axis == DATA else model) > HOST  # neighbours on the axis model are of one host
        return parts.received(received) + is_far * (HOST_LATENCY + received / HOST_BYTES)

    row, logits = cfg.hidden_size, 4 * cfg.vocab_size * own
    gathered = sent(DATA, 2 * row * requests)
    added = sent(DATA, 4 * row * requests) + sent(MODEL, 2 * 4 * row * own)
    experts = of_expert * parts.experts(_touched(cfg, requests, devices))
    layer = of_rest * parts.beside(own) + experts + gathered + added
    once = sent(DATA, 8 * requests) + added + gathered + sent(DATA, logits / model) + sent(MODEL, logits)
    head = plan.tables / flash.tables * parts.head(requests) / devices
    return of_rest * sum(parts.attention(kind, own) for kind in kinds) + layers * layer + once + head


def best(parts: Parts, cfg: ModelConfig, devices: int, requests: int) -> tuple[float, tuple[int, int]]:
    """Return the shortest step in us among meshes of so many devices, and that mesh."""
    shapes = [(data, devices // data) for data in DEVICES if devices % data == 0 and requests % data == 0]
    return min((step_time(parts, cfg, shape, requests), shape) for shape in shapes)


def mesh_times(results: Results) -> str:
    """ms of a step on the best mesh of each number of devices, and where more of them stop paying."""
    parts, rows = Parts(results), []
    for name, cfg in (("V4-Flash", FLASH), ("V4-Pro", ModelConfig.pro())):
        plan = _memory(cfg)
        holding = [devices for devices in DEVICES if plan.per_device(devices) <= DEVICE_BYTES]
        for requests in REQUESTS:
            found = {devices: best(parts, cfg, devices, requests) for devices in holding}
            cells = [
                f"{found[n][0] / 1000:.1f} ({'x'.join(map(str, found[n][1]))})" if n in found else "-" for n in DEVICES
            ]
            pays = next((n for n in holding[:-1] if found[n][0] < GAIN * found[2 * n][0]), holding[-1])
            rows.append((f"{name}, {requests} request{'s' * (requests > 1)}", *cells, f"{pays}"))
    return table(f"ms of a step, computed | {' | '.join(map(str, DEVICES))} | pays up to", rows)
