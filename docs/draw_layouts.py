"""Draws the pictures of README.md and layouts.md into docs/layouts/, from the formats and the plan.

Run as ``python docs/draw_layouts.py``.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from pathlib import Path

import jax

import dsv4jax as d4
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS, KeyRows, KVRows, row_bytes

FOLDER = Path(__file__).parent / "layouts"
CFG = d4.DSV4Config.flash()
PLAN = d4.plan_cache(CFG)
WIDTH, LEFT = 960, 110  # of a picture, and of the names at its left
BLUE, GREEN, ORANGE, PURPLE, EMPTY = "#8ab4f8", "#81c995", "#fcad70", "#c58af9", "#ffffff"


class Picture:
    """SVG elements on a white ground, in pixels from the upper left."""

    def __init__(self, height: int):
        self.height, self.elements = height, list[str]()

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="#555"'
            ' stroke-width=".7"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.elements.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#555" fill="none"/>')

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", size: int = 13) -> None:
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(words)}</text>'
        )

    def __str__(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" font-family="sans-serif">'
        ground = f'<rect width="{WIDTH}" height="{self.height}" fill="#fff"/>'
        return "\n".join([head, ground, *self.elements, "</svg>", ""])


def size_of(leaf: jax.Array | None) -> int:
    """Bytes of a part of a row; leaves are ShapeDtypeStructs."""
    return 0 if leaf is None else leaf.size * leaf.dtype.itemsize


def kv_row(name: str) -> KVRows:
    return KV_FORMATS[name].row(CFG.head_dim - CFG.rope_dim, CFG.rope_dim)


def key_row(name: str) -> KeyRows:
    return INDEXER_FORMATS[name].row(CFG.indexer_head_dim)


def request() -> Picture:
    """What one request leaves in a layer of each kind: its window, entries and tail, over its tokens."""
    picture, length, n_win = Picture(330), 302, CFG.sliding_window
    left, step = 150, (WIDTH - 150 - 30) / length
    picks = CFG.indexer_top_k

    def bar(first: float, last: float, y: float, fill: str) -> None:
        picture.box(left + first * step, y, (last - first) * step, 24, fill)

    def note(y: float, words: str) -> None:
        picture.text(left, y, words, anchor="start", size=12)

    picture.text(WIDTH / 2, 22, f"What a request of {length} tokens keeps in one layer of V4-Flash", size=15)
    picture.text(left - 10, 58, "tokens", anchor="end")
    bar(0, length, 41, EMPTY)
    for token in (0, length - n_win, length):
        picture.line(left + token * step, 65, left + token * step, 71)
        picture.text(left + token * step, 83, str(token), size=11)

    picture.text(left - 10, 117, "every layer", anchor="end")
    bar(length - n_win, length, 100, BLUE)
    picture.text(left + (length - n_win / 2) * step, 117, f"window: the newest {n_win} key rows", size=12)

    for y, name, ratio in (
        (158, "CSA layer", CFG.csa_compression_ratio),
        (244, "HCA layer", CFG.hca_compression_ratio),
    ):
        count, tail = divmod(length, ratio)
        picture.text(left - 10, y + 17, name, anchor="end")
        for entry in range(count):
            bar(entry * ratio, (entry + 1) * ratio, y, PURPLE)
        bar(count * ratio, length, y, ORANGE)
        which = f"an indexer picks up to {picks} of them" if ratio < n_win else "all of them are read"
        note(y + 42, f"{count} entries (purple), each a learned summary that stands for {ratio} tokens; {which}")
        note(y + 59, f"tail (orange): what the last {tail} tokens will contribute to the next entry")
    return picture


def kv_rows() -> Picture:
    """A key row of 512 dims in three formats, to scale."""
    picture = Picture(235)
    names = {"bf16": "bf16", "fp8_row": "E4M3", "fp8_tile64": "E4M3"}
    scale = (WIDTH - LEFT - 90) / row_bytes(kv_row("bf16"))
    for i, (name, nope_type) in enumerate(names.items()):
        row, x, y = kv_row(name), float(LEFT), 20 + 78 * i
        picture.text(LEFT - 10, y + 21, name, anchor="end")
        nope, rope, rest = size_of(row.nope), size_of(row.rope), size_of(row.scale)
        picture.box(x, y, nope * scale, 32, BLUE)
        picture.text(x + nope * scale / 2, y + 21, f"{row.nope.size} NoPE dims, {nope_type}: {nope} B")
        x += nope * scale
        picture.box(x, y, rope * scale, 32, GREEN)
        picture.text(x + rope * scale / 2, y + 15, f"{row.rope.size} RoPE dims,", size=11)
        picture.text(x + rope * scale / 2, y + 27, f"bf16: {rope} B", size=11)
        x += rope * scale
        if rest:
            assert row.scale is not None
            picture.box(x, y, rest * scale, 32, ORANGE)
            what = "one f32 multiplier" if name == "fp8_row" else f"{row.scale.size} UE8M0 exponents"
            picture.line(x + rest * scale / 2, y + 32, x + rest * scale / 2, y + 42)
            picture.text(x, y + 54, f"{what}: {rest} B", size=11)
            x += rest * scale
        picture.text(x + 8, y + 21, f"= {row_bytes(row)} B", anchor="start")
        if name == "fp8_tile64":  # which dims an exponent serves
            assert row.scale is not None
            tile = nope * scale / row.scale.size
            for j in range(row.scale.size):
                picture.line(LEFT + j * tile, y + 32, LEFT + j * tile, y + 40)
                picture.text(LEFT + (j + 0.5) * tile, y + 46, f"tile {j}", size=10)
    return picture


def indexer_keys() -> Picture:
    """An indexer key of 128 dims in the two 4-bit formats, group by group, and one byte of it."""
    picture = Picture(280)
    scale = 9.0
    for i, (name, kind) in enumerate({"nvfp4": "E4M3 scales", "mxfp4": "UE8M0 exponents"}.items()):
        row, y = key_row(name), 20 + 84 * i
        assert row.scale is not None
        groups, codes = row.scale.size, size_of(row.codes)
        picture.text(LEFT - 10, y + 21, name, anchor="end")
        for j in range(groups):
            width = codes / groups * scale
            picture.box(LEFT + j * width, y, width, 32, BLUE if j % 2 else "#c6dafc")
            picture.text(LEFT + (j + 0.5) * width, y + 21, f"{codes // groups} B", size=11)
            picture.box(LEFT + codes * scale + 12 + j * scale * 2, y, scale * 2, 32, ORANGE if j % 2 else "#fedcba")
        picture.text(LEFT + codes * scale / 2, y + 48, f"{CFG.indexer_head_dim} E2M1 codes: {codes} B", size=11)
        dims = CFG.indexer_head_dim // groups
        picture.text(
            LEFT + codes * scale + 12, y + 48, f"{groups} {kind}, one per {dims} dims", anchor="start", size=11
        )
        picture.text(LEFT + codes * scale + 20 + groups * scale * 2, y + 21, f"= {row_bytes(row)} B", anchor="start")
    y = 205
    picture.text(LEFT - 10, y + 21, "one byte", anchor="end")
    bits = ["sign", "exponent", "exponent", "mantissa"]
    for bit in range(8):
        x = LEFT + 72 * bit
        picture.box(x, y, 72, 32, "#c6dafc" if bit < 4 else BLUE)
        picture.text(x + 36, y + 21, bits[bit % 4], size=11)
        picture.text(x + 36, y + 46, f"bit {7 - bit}", size=10)
    picture.text(LEFT + 144, y + 62, "dim 2i + 1", size=11)
    picture.text(LEFT + 432, y + 62, "dim 2i", size=11)
    return picture


def block() -> Picture:
    """One block of the pool: what 128 tokens become in a CSA layer and in an HCA layer."""
    picture, tokens = Picture(300), CFG.block_tokens
    step = (WIDTH - LEFT - 20) / tokens
    m = CFG.csa_compression_ratio
    picture.text(LEFT - 10, 41, "tokens", anchor="end")
    for t in range(tokens):
        picture.box(LEFT + t * step, 28, step, 18, GREEN if t // m % 2 else "#ceead6")
    for t in (0, tokens // 2, tokens):
        picture.text(LEFT + t * step, 20, str(t), size=10)

    per_block = PLAN.entries_per_block(d4.AttentionType.CSA)
    csa, hca = (PLAN.block_bytes(kind) for kind in (d4.AttentionType.CSA, d4.AttentionType.HCA))
    rows = [("CSA entries", 96, BLUE, csa["entries"]), ("CSA keys", 176, PURPLE, csa["indexer keys"])]
    for name, y, fill, size in rows:
        picture.text(LEFT - 10, y + 15, name, anchor="end")
        for e in range(per_block):
            picture.box(LEFT + e * m * step, y, m * step, 22, fill)
            picture.text(LEFT + (e + 0.5) * m * step, y + 15, str(e), size=10)
        words = f"{per_block} rows x {size // per_block} B = {size:,} B"
        picture.text(LEFT + tokens * step / 2, y + 38, words, size=12)
    for e in (0, 1, 2, 3):  # an entry reads its own tokens' a-stream and the b-stream of those before
        x = LEFT + (e + 0.5) * m * step
        picture.line(x, 96, x, 46)
        if e:
            picture.line(x, 96, x - m * step, 46)
    picture.text(
        LEFT + 5 * m * step,
        76,
        "entry i pools tokens 4i .. 4i + 3 (a-stream) and 4i - 4 .. 4i - 1 (b-stream)",
        anchor="start",
        size=12,
    )
    picture.text(LEFT - 10, 265, "HCA entry", anchor="end")
    picture.box(LEFT, 250, tokens * step, 22, BLUE)
    picture.text(LEFT + tokens * step / 2, 265, f"one row, pooled from all {CFG.hca_compression_ratio} tokens")
    picture.text(LEFT + tokens * step / 2, 290, f"{hca['entries']:,} B", size=12)
    return picture


def window() -> Picture:
    """The window of a request as a ring: position p sits in row p mod n_win."""
    picture, n_win, length = Picture(310), 16, 23
    x0, y0, radius = 200, 155, 130
    for row in range(n_win):
        angle = 2 * math.pi * row / n_win - math.pi / 2
        x, y = x0 + radius * math.cos(angle), y0 + radius * math.sin(angle)
        position = length - 1 - (length - 1 - row) % n_win
        picture.box(x - 19, y - 11, 38, 22, ORANGE if row == length % n_win else BLUE)
        picture.text(x, y + 4, f"p {position}", size=11)
        picture.text(x0 + 95 * math.cos(angle), y0 + 95 * math.sin(angle) + 4, str(row), size=10)
    picture.text(x0, y0 - 2, "row =", size=12)
    picture.text(x0, y0 + 14, f"p mod {n_win}", size=12)
    said = [
        f"A request of {length} tokens and a window of {n_win} rows (the models have {CFG.sliding_window}).",
        f"Its rows hold positions {length - n_win} to {length - 1}: what the newest token sees, itself included.",
        f"The next token, p = {length}, goes to row {length} mod {n_win} = {length % n_win} (orange), over position"
        f" {length - n_win}.",
        "Beside each row stands the position that it holds, int32, -1 where empty:",
        f"{CFG.sliding_window} x ({row_bytes(kv_row(PLAN.kv_format))} + 4) B ="
        f" {PLAN.state_bytes(d4.AttentionType.SWA)['window']:,} B per request and layer in {PLAN.kv_format}.",
    ]
    for i, words in enumerate(said):
        picture.text(390, 105 + 26 * i, words, anchor="start", size=12)
    return picture


def tails() -> Picture:
    """What a compressor keeps between steps, of a request that stands at phase 3 of its CSA block."""
    picture, m, phase = Picture(430), CFG.csa_compression_ratio, 3
    state = {kind: PLAN.state_bytes(kind) for kind in d4.AttentionType}
    online = d4.plan_cache(CFG, hca_tail="online").state_bytes(d4.AttentionType.HCA)["tail"]
    names = [
        ("kb, zb", "b-stream of the block before", m),
        ("ka, za", "a-stream of this block", phase),
        ("kb_next, zb_next", "b-stream of this block", phase),
    ]
    picture.text(20, 24, "CSA: six arrays of 4 rows, here after 3 tokens of a block", anchor="start", size=14)
    for i, (name, what, filled) in enumerate(names):
        y = 40 + 44 * i
        picture.text(150, y + 18, name, anchor="end")
        for array in range(2):
            for row in range(m):
                fill = (PURPLE, ORANGE)[array] if row < filled else EMPTY
                picture.box(165 + array * 150 + row * 32, y, 32, 26, fill)
        picture.text(460, y + 18, what, anchor="start", size=12)
    picture.line(720, 140, 745, 140)
    picture.line(745, 140, 745, 53)
    picture.line(745, 53, 720, 53)
    picture.line(726, 49, 720, 53)
    picture.line(726, 57, 720, 53)
    picture.text(755, 92, "rotate: when the block", anchor="start", size=12)
    picture.text(755, 108, "is complete", anchor="start", size=12)
    csa = state[d4.AttentionType.CSA]
    picture.text(
        20,
        190,
        f"main: 6 x 4 x {CFG.head_dim} x 4 B = {csa['tail']:,} B;  indexer: 6 x 4 x {CFG.indexer_head_dim}"
        f" x 4 B = {csa['indexer tail']:,} B",
        anchor="start",
        size=12,
    )

    picture.text(20, 236, "HCA, ring: two arrays of 128 rows", anchor="start", size=14)
    rows, width = CFG.hca_compression_ratio, 6.0
    for array, (name, y) in enumerate((("ka", 250), ("za", 282))):
        picture.text(150, y + 16, name, anchor="end")
        for row in range(rows):
            picture.box(165 + row * width, y, width, 22, (PURPLE, ORANGE)[array] if row < 70 else EMPTY)
    ring = state[d4.AttentionType.HCA]["tail"]
    picture.text(20, 326, f"2 x {rows} x {CFG.head_dim} x 4 B = {ring:,} B", anchor="start", size=12)

    picture.text(20, 370, "HCA, online: a running softmax in three rows", anchor="start", size=14)
    for i, name in enumerate(("peak", "total", "weighted")):
        picture.box(165 + 110 * i, 382, 100, 26, GREEN)
        picture.text(215 + 110 * i, 400, name, size=12)
    picture.text(510, 400, f"3 x {CFG.head_dim} x 4 B = {online:,} B", anchor="start", size=12)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    function.__name__: function for function in (request, kv_rows, indexer_keys, block, window, tails)
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main()
