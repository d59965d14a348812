"""State of requests beside their rows takes the changes that docs/add-state.md lists, and no other."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# By file, a line and the line to add after it.
CHANGES = {
    "dsv4jax/cache/state.py": [
        (
            "    indexer_tail: CSATail | None  # CSA only\n",
            "    last_ids: jax.Array  # int32 [layers, requests, 3] the newest tokens, -1 = none\n",
        ),
        (
            "        indexer_tail=empty_tail(indexer_tail, lead),\n",
            "        last_ids=jnp.full((*lead, 3), -1, jnp.int32),\n",
        ),
    ],
    "dsv4jax/plan.py": [
        (
            '        parts = {"window": self.cfg.sliding_window * (row_bytes(self.row_spec) + 4)}\n',
            '        parts["last ids"] = 3 * 4\n',
        ),
    ],
}
PROGRAM = """
import dataclasses
import sys
import jax
import jax.numpy as jnp
import numpy as np
import dsv4jax as d4

assert d4.__file__.startswith(sys.argv[1]), d4.__file__
# Those that have kernels.
sizes = dict(num_heads=64, o_groups=2, head_dim=512, rope_dim=64, indexer_heads=64, indexer_head_dim=128)
cfg = d4.DSV4Config.tiny(compress_ratios=(0, 4, 16), hca_compression_ratio=16, **sizes)
plan = d4.plan_cache(cfg, max_requests=6, max_context=32, kv_format="bf16", indexer_format="mxfp4")


def ids(cache):
    found = [np.asarray(cache.stack(kind).state.last_ids) for kind in cache.kinds]
    assert all((each == found[0]).all() for each in found)
    return found[0][0]


def keep(cache, slots, newest):
    def kept(_, stack):
        state = dataclasses.replace(stack.state, last_ids=stack.state.last_ids.at[:, slots].set(newest))
        return dataclasses.replace(stack, state=state)

    return cache.map_stacks(kept)


cache, slots, ok = d4.admit(d4.init_cache(plan), 2)
cache = keep(cache, slots, jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32))
ones = jnp.ones(2, jnp.int32)
cache, ok = d4.prepare_forward(cache, slots, ones)
assert ok.all()
params = d4.init_attention_params(jax.random.key(0), cfg, 2, "float32")
x = jax.random.normal(jax.random.key(1), (2, 1, cfg.hidden_size))
for backend in ("xla", "pallas_simulated"):  # a layer leaves them alone
    _, after = d4.attention_layer(params, x, cache, 2, slots, ones, backend=backend)
    assert (ids(after) == ids(cache)).all()
cache = d4.advance(after, slots, ones)
cache, copies, ok = d4.admit(cache, 1)
assert ok.all()
cache, ok = d4.fork(cache, slots[1], copies)
assert ok.all() and (ids(cache)[copies[0]] == [4, 5, 6]).all()
saved = d4.extract(cache, slots)
other, found, ok = d4.insert(d4.init_cache(plan), saved)
assert ok.all() and (ids(other)[np.asarray(found)] == [[1, 2, 3], [4, 5, 6]]).all()
d4.requests.save(sys.argv[1] + "/saved", cache)
assert (ids(d4.requests.restore(sys.argv[1] + "/saved")) == ids(cache)).all()
cache = d4.release(cache, slots)
cache, again, ok = d4.admit(cache, 2)
assert ok.all() and (ids(cache)[np.asarray(again)] == -1).all()  # nothing of a request that was there before
assert plan.memory_bytes() == d4.cache.tree_bytes(d4.init_cache(plan)), "the plan counts them"
mesh = jax.make_mesh((1,), ("data",))
specs = d4.sharding.partition_specs(plan, mesh)
assert specs.csa.state.last_ids == jax.sharding.PartitionSpec(None, "data")
"""


@pytest.mark.sweep(guard="test_a_fourth_kind_takes_three_files")
def test_state_of_requests_takes_two_files(tmp_path):
    for package in ("dsv4jax", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs/add-state.md").read_text()
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
