"""Two processes that have two devices each, as hosts of a cluster have: together they make the tokens of one device.

And they save the model that they hold together.
"""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from dsv4jax.model import generate, init_caches, load_model, random_model
from dsv4jax.model.checkpoint.save import save_model
from tests.support.models import FULL, SMALL
from tests.support.paths import ROOT

PROMPTS = [[1, 2, 3], [4], [5, 0, 2, 1, 4, 3, 3, 1]]
ONE_LAYER = dataclasses.replace(SMALL.attention, compress_ratios=(0,))
CFG = dataclasses.replace(SMALL, attention=ONE_LAYER, num_hash_layers=0, vocab_size=8)
NEW = 8

# The command of a user; then calls on a cache of which each process has one shard, the last ones with a prefix there.
PROGRAM = f"""
import sys
import jax
import numpy as np
import dsv4jax as d4
from dsv4jax import generate
from dsv4jax.model import init_caches, load_model, save_model

assert generate.main(sys.argv[1:]) == 0
cfg = generate.ModelConfig.from_hf(sys.argv[1])
mesh = jax.make_mesh((2, 2), ("data", "model"))
cache = init_caches(cfg, 4, 256, mesh=mesh, **{FULL}).model
cache, slots, ok = d4.admit(cache, 2)
assert d4.verify(cache) == []
(mine,) = d4.sharding.local_shards(cache)
assert mine == jax.process_index()
assert d4.describe(d4.sharding.shard_of(cache, mine)).free_slots == 1
assert d4.extract(d4.sharding.shard_of(cache, mine), [0]).num_requests == 1
params, again = load_model(sys.argv[1], weights="f32", mesh=mesh), sys.argv[1] + "-again"
save_model(params, again)
for call in (lambda: d4.sharding.shard_of(cache, 1 - mine), lambda: d4.requests.save("/nowhere", cache),
             lambda: save_model(params, again)):
    try:
        call()
    except (ValueError, FileExistsError) as error:
        print(str(error).replace(sys.argv[1], "model")[:60])
rows, counts, tokens = np.array([-1, 0], np.int32), np.array([0, 128], np.int32), np.arange(128)
cache = d4.advance(d4.prepare_forward(cache, rows, counts)[0], rows, counts)
store, cache, ok = d4.requests.PrefixStore(cache.plan, 1, shards=2).keep(cache, 2, tokens)
cache, _, _ = d4.admit(d4.release(cache, rows), 2, rows == 0)
store, cache, stored = store.start(cache, 2, [*tokens, 5])
assert ok and store.describe(cache).prefixes == store.prefixes and store.make_room(cache, 0)[2]
print(store.prefixes[0].slot, stored)
"""


def run_processes(*arguments: str) -> list[tuple[str, str]]:
    """Run two processes with the environment that SLURM gives them. Returns what each wrote to its two outputs."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    cluster = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_COORDINATOR_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            env=os.environ | cluster | devices | {"SLURM_PROCID": number, "SLURM_LOCALID": number},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    try:
        said = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors
    return said


# Gloo writes these from several threads, in any order.
GLOO = re.compile(
    r"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*"
)


def without_gloo(said: str) -> list[str]:
    """The lines of the command and of the calls."""
    return [line for line in said.splitlines() if not GLOO.fullmatch(line)]


@pytest.mark.slow
def test_two_processes_make_the_tokens_of_one_device(tmp_path):
    """With drafts. Each reads the folder for its own devices, and the first one alone speaks."""
    params = random_model(CFG, jax.random.key(1), weights="f32")
    save_model(params, tmp_path / "model")
    caches = init_caches(CFG, 4, 1024, 1, **FULL)
    alone = generate(params, PROMPTS, NEW, drafts=1, caches=caches)
    ids = [argument for prompt in PROMPTS for argument in ("--ids", ",".join(map(str, prompt)))]
    options = ["--temperature", "0", "--weights", "f32", "--max-new", str(NEW), "--drafts", "1", "--ignore-eos"]
    where = ["--mesh", "2x2", "--distributed", "--json"]
    (said, speed), (other, nothing) = run_processes(str(tmp_path / "model"), *ids, *options, *where)
    lines = without_gloo(said)
    assert json.loads(lines[0])["tokens"] == alone.tokens
    assert re.search(r"(\d+) of \d+ drafts accepted", speed)
    wanted = [
        "shard 1 is held by devices of another process",
        "save: other processes hold parts of this cache: let each sav",
        "model-again exists and is not empty: save to a new folder",
        "3 128",
    ]
    assert lines[1:] == wanted
    wanted[0], wanted[2] = wanted[0].replace("1", "0"), "the first process cannot make model-again"
    assert without_gloo(other) == wanted
    assert "tokens/s" not in nothing
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "model-again", weights="f32"), params)
