"""The reference itself gives the recorded outputs. Tests that compare with the reference rely on this one."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.layer.reference import reference_layer
from tests.support import recorded

KINDS = ("swa", "csa", "hca")
COMPRESSED = ("csa", "hca")
# fp32 sums in another order: values of rms 0.4 agree to a few 1e-7; the recordings among themselves to 6e-7.
TOLERANCE = 2e-5
# The recorded rounded run keeps rope dims in fp32 where the format stores bfloat16: their 2^-9 relative error, through
# 8 of 136 dims of each key.
ROUNDED_RMS = 4e-4


@functools.cache
def reference(kind, kv_format="f32", indexer_format="f32") -> Any:
    recording = recorded.load(kind)
    return reference_layer(recording.params, jnp.asarray(recording.x), recording.cfg, 0, kv_format, indexer_format)


def ring(rows, n_win):
    """Return the newest rows in the window's order: position p in row p mod n_win."""
    window = np.zeros((n_win, rows.shape[1]), np.float32)
    for position in range(len(rows)):
        window[position % n_win] = rows[position]
    return window


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_rows_equal_the_recorded_ones(kind):
    recording, result = recorded.load(kind), reference(kind)
    np.testing.assert_allclose(result.out, recording.arrays["out"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(result.out, recording.arrays["out_hf"], rtol=0, atol=TOLERANCE)
    window = ring(np.asarray(result.rows), recording.cfg.sliding_window)
    np.testing.assert_allclose(window, recording.arrays["window"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_entries_equal_the_recorded_ones(kind):
    recording, result = recorded.load(kind), reference(kind)
    np.testing.assert_allclose(result.entries, recording.arrays["entries"], rtol=0, atol=TOLERANCE)


def test_indexer_entries_and_picks_equal_the_recorded_ones():
    recording, result = recorded.load("csa"), reference("csa")
    np.testing.assert_allclose(result.indexer_entries, recording.arrays["indexer_entries"], rtol=0, atol=TOLERANCE)
    assert result.seen is not None
    for token, picks in enumerate(recording.arrays["topk"]):
        assert set(np.flatnonzero(result.seen[token])) == set(picks[picks >= 0]), f"token {token}"


def test_an_hca_query_sees_every_complete_entry_its_own_included():
    recording, result = recorded.load("hca"), reference("hca")
    assert result.seen is not None
    for token, seen in enumerate(result.seen):
        assert np.flatnonzero(seen).tolist() == list(range((token + 1) // recording.cfg.hca_compression_ratio))


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_outputs_equal_the_recorded_ones(kind):
    recording, result = recorded.load(kind), reference(kind, "fp8_tile64", "mxfp4")
    error = np.asarray(result.out) - recording.arrays["out_q"]
    assert np.sqrt(np.mean(error**2)) < ROUNDED_RMS
    # The rounding itself is two orders above this agreement: a run that skipped it would not pass.
    assert np.sqrt(np.mean((recording.arrays["out"] - recording.arrays["out_q"]) ** 2)) > 10 * ROUNDED_RMS


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_rows_equal_the_recorded_ones(kind):
    recording, result = recorded.load(kind), reference(kind, "fp8_tile64", "mxfp4")
    pairs = [(ring(np.asarray(result.rows), recording.cfg.sliding_window), "window_q")]
    if kind in COMPRESSED:
        pairs.append((np.asarray(result.entries), "entries_q"))
    for got, name in pairs:
        assert recorded.moved_values(got, recording.rounded(name)) <= recorded.MOVED * got.size, name
    if kind == "csa":
        got, want = np.asarray(result.indexer_entries), recording.arrays["indexer_entries_q"]
        assert recorded.moved_values(got, want) <= recorded.MOVED * want.size
