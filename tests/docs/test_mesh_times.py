"""The computed times of steps on meshes add up the recorded parts."""

import pytest

from benchmarks.kernels.lines import Results
from benchmarks.kernels.mesh_times import FLASH, HOST_LATENCY, Parts, _touched, best, step_time

RESULTS = Results.load()
PARTS = Parts(RESULTS)


def median(case: str) -> float:
    line = RESULTS.case(case)
    return line["us"]["median"] if "us" in line else line.get("median") or line["microseconds"]


def test_one_device_takes_the_sum_of_the_parts():
    layers, csa = FLASH.num_layers, FLASH.attention.compress_ratios.count(4)
    beside = ("shared expert 64 tokens", "router 64 tokens, bias", "pallas after attention 64 tokens")
    every = sum(map(median, (*beside, "pallas after experts 64 tokens", "experts bf16 64 tokens")))
    attention = csa * median("layer csa B64 32768 stored bf16")
    attention += (layers - csa) * median("layer hca B64 32768 stored bf16")
    wanted = attention + layers * every + median("head 64 tokens")
    assert step_time(PARTS, FLASH, (1, 1), 64) == pytest.approx(wanted, rel=1e-9)  # f64


def test_two_devices_divide_experts_and_head_and_send_sums():
    """Of the six experts of a token the busier device reads 3.9; sums of a row in f32, of the logits, and of rows."""
    busier = _touched(FLASH, 1, 2)
    assert 3.7 < busier < 4.1  # 3.94 on average over all picks; the seed is fixed
    one, two = (step_time(PARTS, FLASH, shape, 1) for shape in ((1, 1), (1, 2)))
    row = PARTS.received(4 * FLASH.hidden_size)
    saved = FLASH.num_layers * (PARTS.experts(6) - PARTS.experts(busier)) + median("head 1 tokens") / 2
    sent = (FLASH.num_layers + 1) * row + PARTS.received(2 * FLASH.vocab_size)
    assert two == pytest.approx(one - saved + sent, rel=1e-9)


def test_hosts_are_farther_than_neighbours():
    """Over two hosts, each with a shard, sums of the axis model stay within a host."""
    near = step_time(PARTS, FLASH, (1, 8), 1)
    assert step_time(PARTS, FLASH, (1, 16), 1) - near > (FLASH.num_layers - 10) * HOST_LATENCY
    assert best(PARTS, FLASH, 8, 64)[0] < best(PARTS, FLASH, 2, 64)[0]
