"""A fourth kind of layer takes the changes that docs/add-kind.md lists, and no other."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# By file, a line and the line to add after it.
CHANGES = {
    "dsv4jax/kinds.py": [
        ('    HCA = "hca"\n', '    MCA = "mca"\n'),
        (
            '    AttentionType.HCA: "heavily_compressed_attention",\n',
            '    AttentionType.MCA: "mildly_compressed_attention",\n',
        ),
    ],
    "dsv4jax/config.py": [("    hca_compression_ratio: int = 128\n", "    mca_compression_ratio: int = 8\n")],
    "dsv4jax/cache/stack.py": [("    hca: LayerStack | None\n", "    mca: LayerStack | None\n")],
}
PROGRAM = """
import sys
import jax
import numpy as np
import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer

assert d4.__file__.startswith(sys.argv[1]), d4.__file__
sizes = dict(num_heads=64, o_groups=2, head_dim=512, rope_dim=64, indexer_head_dim=128)  # those that have kernels
cfg = d4.DSV4Config.tiny(compress_ratios=(0, 4, 8, 16), hca_compression_ratio=16, **sizes)
assert d4.config.layer_schedule(cfg)[2].attn == "mca"
params = d4.init_attention_params(jax.random.key(0), cfg, 2, "float32")
x = jax.random.normal(jax.random.key(1), (37, cfg.hidden_size))
# XLA sums f32 in another order. Kernels multiply f16, of 2^-11 relative error, in several products in a row.
for backend, kv_format, tolerance in (("xla", "f32", 1e-5), ("pallas_simulated", "bf16", 2**-9)):
    plan = d4.plan_cache(cfg, max_requests=1, max_context=48, kv_format=kv_format, indexer_format="f32")
    cache, slots, ok = d4.admit(d4.init_cache(plan), 1)
    assert ok.all()
    found, at = [], 0
    for tokens in (5, 1, 1, 20, 1, 9):  # within entries of 8 tokens, across several, and at their ends
        num_new = np.array([tokens], np.int32)
        cache, ok = d4.prepare_forward(cache, slots, num_new)
        assert ok.all()
        y, cache = d4.attention_layer(params, x[None, at : at + tokens], cache, 2, slots, num_new, backend=backend)
        cache, at = d4.advance(cache, slots, num_new), at + tokens
        found.append(np.asarray(y[0]))
    wanted = np.asarray(reference_layer(params, x, cfg, 2, kv_format=kv_format).out)
    error = np.abs(np.concatenate(found) - wanted).max() / np.abs(wanted).max()
    assert error < tolerance, (backend, error)
"""


@pytest.mark.slow
def test_a_fourth_kind_takes_three_files(tmp_path):
    for package in ("dsv4jax", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs/add-kind.md").read_text()
    for name, pairs in CHANGES.items():
        assert f"| `{name}` |" in page
        text = (tmp_path / name).read_text()
        for line, added in pairs:
            assert text.count(line) == 1
            text = text.replace(line, line + added)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
