"""In place is a property of the compiled program: aliased bytes are the cache, and nothing grows with the pool."""

import dataclasses

import jax
import pytest

import dsv4jax as d4
from dsv4jax.layer.stages.compose import Stages
from tests.support import in_place, model_in_place
from tests.support.cases import first_of
from tests.support.compile_for_gpu import report_of

BOOKKEEPING = (
    "admit",
    "prepare_forward",
    "advance",
    "release",
    "fork",
    "insert",
    "keep a prefix",
    "start from a prefix",
)


def check(name: str, found: dict[str, int]) -> None:
    for size in ("small", "large"):
        assert found[f"aliased_{size}"] == found[f"donated_{size}"], f"{name}: a donated byte is not updated in place"
    # Bookkeeping works on whole tables: some int32 per block id, slot and block table entry, none of state or pool.
    growth = 6 * 4 * in_place.table_entries(in_place.LARGE) if name in BOOKKEEPING else 0
    # A forward pass holds a few numbers per slot.
    growth += 1024 + 16 * in_place.LARGE // 128
    assert found["copied_large"] <= found["copied_small"] + growth, f"{name}: copies grow with the cache"
    # How densely the compiler packs the same temporaries differs by a hundredth from one program to the next.
    growth += found["temporaries_small"] // 50
    assert found["temporaries_large"] <= found["temporaries_small"] + growth, f"{name}: temporaries grow with the cache"


def compile_here(function, *args, **jit_options):
    return jax.jit(function, **jit_options).lower(*args).compile()


WHOLE_STEPS = [name for name in in_place.AUDITS if any(word in name for word in ("step", "chunk", "draft", "scan"))]
PARTS = [name for name in in_place.AUDITS if name not in WHOLE_STEPS]


@pytest.mark.usefixtures(
    "quick_compilation"
)  # as in all tests here: what it leaves out comes after buffers have a place
@pytest.mark.parametrize("name", [*first_of(PARTS, count=4), *first_of(WHOLE_STEPS, count=0)])
def test_every_update_is_in_place_on_this_device(name):
    check(name, in_place.AUDITS[name](compile_here))


@pytest.mark.parametrize(
    ("target", "options"),
    first_of([("h200", ()), ("h200", ("--all",)), ("b200", ())], count=0),
    ids=["h200", "all of h200", "b200"],
)
def test_every_update_is_in_place_compiled_for(target, options):
    reports = report_of("tests.support.compile_for_gpu", target, *options)
    audits = in_place.ALL if options else in_place.STEP
    assert reports.keys() == audits.keys() | {"prefill temporaries", "reads of grants"}
    one_layer, eight_layers = reports.pop("reads of grants")
    assert eight_layers == one_layer > 0, "layers after the first compute their grants again"
    assert all(size < in_place.PREFILL_LIMIT for size in reports.pop("prefill temporaries").values())
    for name, found in reports.items():
        check(name, found)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_chunk_in_tiles_of_queries_is_in_place(monkeypatch):
    """Its tiles run in a loop that reads window and pool; the window is written after it."""
    monkeypatch.setattr(Stages, "tile", lambda *_: 8)
    cfg = dataclasses.replace(in_place.CFG, compress_ratios=(4, 4))
    check("chunk in tiles", in_place.forward(tokens=36, cfg=cfg)(compile_here))


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", first_of(["loop", "prompts"], count=0))
def test_the_programs_that_generate_texts_are_in_place(name):
    """The loop holds drafts that are staged and committed, and guesses in a copy of the drafts' window."""
    function, arguments, donated = model_in_place.programs(drafts=2)[name]
    compiled = compile_here(function, *arguments, donate_argnums=donated)
    memory, size, hlo = in_place.memory_of(compiled), in_place.bytes_of(arguments[donated]), compiled.as_text()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size // 8
    assert hlo is not None
    assert in_place.copied_bytes(hlo) < size // 8


def test_a_copy_of_the_pool_would_be_noticed():
    """The audit itself: a step that returns a value of the old pool cannot be in place, and must be caught."""

    def leaky(cache, slots, num_new):
        old = cache.csa.pool.entries.nope
        cache, _ = d4.prepare_forward(cache, slots, num_new)
        pool = cache.csa.pool.entries.nope.at[0, 0, 0].set(1)
        return old, pool, cache.tables

    with pytest.raises(AssertionError, match="not updated in place"):
        check("leaky", in_place.bookkeeping(leaky)(compile_here))


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("layer", "dtype"),
    first_of([(1, "bfloat16"), (2, "bfloat16"), (0, "bfloat16"), (1, "float32")], count=0),
    ids=["csa", "hca", "swa", "csa, f32"],
)
def test_a_long_chunk_against_a_long_context_stays_below_a_gibibyte(layer, dtype):
    function, args = in_place.flash_prefill(layer, dtype)
    memory = in_place.memory_of(jax.jit(function, donate_argnums=2).lower(*args).compile())
    assert memory.temp_size_in_bytes < in_place.PREFILL_LIMIT


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_pro_traces_and_compiles_by_scanning_over_its_layers():
    """61 layers, each kind's body compiled once. Its time is printed by benchmarks/compile_time.py."""
    function, args = in_place.pro_scan()
    compiled = jax.jit(function, donate_argnums=2).lower(*args).compile()
    cache = args[2]
    assert in_place.memory_of(compiled).alias_size_in_bytes == cache.plan.memory_bytes()
    assert len(jax.tree.leaves(cache)) <= 80
