"""Rows of the cache are converted to FlashMLA's pages and back, byte for byte."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4jax.flashmla import from_flashmla_pages, page_bytes, to_flashmla_pages
from dsv4jax.formats import KV_FORMATS, KVRows
from tests.support.driver import assert_same

# 64 is FlashMLA's own page; 1, 2 and 65 put the scales at odd places; 32 is a CSA block of this cache; 72 rows are the
# one size here whose scales end on the page's last byte (72 * 8 = 576), so that no byte is left to pad.
PAGE_ROWS = (1, 2, 32, 64, 65, 72)
NUM_PAGES = 3


def random_rows(rows_per_page: int) -> KVRows:
    """Return rows of random bytes, including NaN and infinity of E4M3, of bf16 (with payloads) and of UE8M0."""
    rng = np.random.default_rng(rows_per_page)
    lead = NUM_PAGES, rows_per_page
    nope, rope = rng.integers(0, 256, (*lead, 448), np.uint8), rng.integers(0, 1 << 16, (*lead, 64), np.uint16)
    scale = rng.integers(0, 256, (*lead, 7), np.uint8)
    nope[0, 0, :2] = 0x7F, 0xFF  # both NaNs of E4M3
    rope[0, 0, :4] = 0x7F80, 0xFF80, 0x7FC1, 0xFF81  # infinities, a quiet and a signalling NaN of bf16
    scale[0, 0, 0] = 0xFF  # NaN of UE8M0
    return KVRows(nope=jnp.asarray(nope), rope=jnp.asarray(rope.view(ml_dtypes.bfloat16)), scale=jnp.asarray(scale))


def numpy_pages(rows: KVRows) -> np.ndarray:
    """Write the pages byte by byte into a file image."""
    nope, rope, scale = np.asarray(rows.nope), np.asarray(rows.rope), np.asarray(rows.scale)
    images = []
    for page in range(nope.shape[0]):
        image = bytearray()
        for row in range(nope.shape[1]):
            image += nope[page, row].tobytes() + rope[page, row].view(np.uint16).astype("<u2").tobytes()
        for row in range(nope.shape[1]):
            image += scale[page, row].tobytes() + b"\0"
        while len(image) % 576:
            image += b"\0"
        images.append(np.frombuffer(bytes(image), np.uint8))
    return np.stack(images)


@pytest.mark.parametrize("rows_per_page", PAGE_ROWS)
def test_pages_hold_the_bytes_of_an_independent_construction(rows_per_page):
    rows = random_rows(rows_per_page)
    np.testing.assert_array_equal(np.asarray(to_flashmla_pages(rows)), numpy_pages(rows))


@pytest.mark.parametrize("rows_per_page", PAGE_ROWS)
def test_rows_come_back_from_pages_bit_for_bit(rows_per_page):
    rows = random_rows(rows_per_page)
    pages = to_flashmla_pages(rows)
    back = from_flashmla_pages(pages, rows_per_page)
    assert_same(back, rows)
    assert_same(to_flashmla_pages(back), pages)


def test_padding_bytes_are_ignored_when_read_and_zero_when_written():
    rows = random_rows(65)
    pages = np.array(to_flashmla_pages(rows))
    padding = np.ones(pages.shape[1], bool)
    padding[: 65 * 576] = False
    scales = padding[65 * 576 : 65 * 584].reshape(65, 8)
    scales[:, :7] = False
    assert padding.sum() == 65 + (page_bytes(65) - 65 * 584)
    assert not pages[:, padding].any()
    pages[:, padding] = 0xA5
    assert_same(from_flashmla_pages(jnp.asarray(pages), 65), rows)


def test_encoded_rows_decode_the_same_after_a_round_trip_inside_one_jit():
    tile64 = KV_FORMATS["fp8_tile64"]
    x = np.random.default_rng(0).standard_normal((NUM_PAGES, 32, 512), np.float32)
    rows = jax.jit(tile64.encode, static_argnums=1)(x, 64)
    through = jax.jit(lambda rows: tile64.decode(from_flashmla_pages(to_flashmla_pages(rows), 32)))(rows)
    np.testing.assert_array_equal(np.asarray(through), np.asarray(jax.jit(tile64.decode)(rows)))


def test_page_sizes_worked_out_by_hand():
    # rows: bytes of data and scales -> next multiple of 576
    by_hand = {1: (584, 1152), 2: (1168, 1728), 64: (37376, 37440), 65: (37960, 38016), 72: (42048, 42048)}
    for rows, (used, size) in by_hand.items():
        assert rows * 584 == used
        assert page_bytes(rows) == size


def test_wrong_arguments_are_refused_by_name():
    rows = random_rows(2)
    pages = to_flashmla_pages(rows)
    # a rank too many, a scale per row as in fp8_row, rope in f32, one page more of rope than of the rest
    wrong = {
        "nope": rows.nope[None],
        "scale": jnp.zeros((NUM_PAGES, 2, 1), jnp.uint8),
        "rope": rows.rope.astype(jnp.float32),
    }
    for part, value in wrong.items():
        parts = {"nope": rows.nope, "rope": rows.rope, "scale": rows.scale} | {part: value}
        with pytest.raises(AssertionError, match=rf"rows\.{part}: expected"):
            to_flashmla_pages(KVRows(**parts))
    with pytest.raises(AssertionError, match=r"rows\.scale: expected uint8 .* got NoneType"):
        to_flashmla_pages(KVRows(nope=rows.nope, rope=rows.rope, scale=None))
    with pytest.raises(AssertionError, match=r"rows\.rope: expected"):
        to_flashmla_pages(KVRows(nope=rows.nope, rope=rows.rope[:2], scale=rows.scale))
    with pytest.raises(AssertionError, match=r"pages: expected uint8 \[P, page_bytes=2304\], got uint8\[3, 1728\]"):
        from_flashmla_pages(pages, 3)
    with pytest.raises(ValueError, match="rows_per_page must be at least 1, got 0"):
        from_flashmla_pages(pages, 0)
