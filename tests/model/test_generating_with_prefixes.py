"""Texts of a generator that keeps prefixes are those of one that does not; documents are stored once."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dsv4jax.model import Caches, Generator, Sampling, init_caches, restore_caches, save_caches
from dsv4jax.requests import PrefixStore
from tests.support.cases import first_of
from tests.support.models import FULL, SMALL, drawn_model, laid_over

# Of one layer, because each kind of generator compiles its own programs; what a mesh divides is divisible by four.
CFG = dataclasses.replace(
    SMALL, vocab_size=8, attention=dataclasses.replace(SMALL.attention, compress_ratios=(4,)), num_hash_layers=0
)
CONTEXT = 512
RNG = np.random.default_rng(0)
DOCUMENT = RNG.integers(0, CFG.vocab_size, 256).tolist()
QUESTIONS = [RNG.integers(0, CFG.vocab_size, n).tolist() for n in (3, 1, 40, 7, 118)]
ABOUT = [DOCUMENT + question for question in QUESTIONS]
NEW = 6


@functools.cache
def model_over(shape=None):
    """The model on one device, or over a mesh of that shape."""
    return drawn_model(CFG, 1, "f32") if shape is None else laid_over(shape, model_over())


def caches(rows, drafts=0, **options):
    return init_caches(CFG, rows, CONTEXT, drafts, **(FULL | options))


def generator(rows, prefixes, drafts=0, **options):
    both = caches(rows + prefixes, drafts, **options)
    return Generator(model_over(), caches=both, drafts=drafts, prefixes=prefixes)


@functools.cache
def alone(prompt, max_new):
    """What follows a prompt without a store."""
    return generator(1, 0).generate([list(prompt)], max_new, stop_tokens=()).tokens[0]


def check(found, prompts, max_new=NEW):
    assert found.tokens == [alone(tuple(prompt), max_new) for prompt in prompts]


def sound(chat):
    held = chat._caches
    assert chat.prefixes.verify(held.model) == []
    if held.drafts is not None:
        assert np.array_equal(held.drafts.tables.admitted, held.model.tables.admitted)
        assert np.array_equal(held.drafts.seq_lens, held.model.seq_lens)


@pytest.mark.sweep(guard="test_each_shard_stores_a_document_once")
@pytest.mark.parametrize("drafts", first_of([0, 2], count=0))
def test_a_document_is_stored_once(drafts):
    chat = generator(2, 2, drafts)
    found = chat.generate(ABOUT, NEW, stop_tokens=())
    check(found, ABOUT)
    assert found.stored == len(DOCUMENT) + sum(len(question) - 1 for question in QUESTIONS)
    sound(chat)
    again = chat.generate([DOCUMENT + [5, 4]], NEW, stop_tokens=())  # in another call as well
    check(again, [DOCUMENT + [5, 4]])
    assert again.stored == 1


@pytest.mark.sweep(guard="test_each_shard_stores_a_document_once")
def test_drawn_texts_are_those_without_a_store():
    sampling = Sampling.of(temperature=1.0, seed=3)
    found = [generator(2, prefixes).generate(ABOUT, NEW, sampling, ()).tokens for prefixes in (0, 2)]
    assert found[0] == found[1]


def scarce(drafts=0):
    """Three rows, and blocks for one text of the longest and one block more."""
    return generator(3, 2, drafts, num_blocks=4)


@pytest.mark.parametrize("drafts", first_of([0, 2], count=0))
def test_prefixes_give_way_to_texts_and_texts_still_share_them(drafts):
    """Texts of up to three blocks, of several documents."""
    other = RNG.integers(0, CFG.vocab_size, 200).tolist()
    prompts = [ABOUT[0], other + [1], ABOUT[2], other + [2, 2], ABOUT[4], [1, 2, 3], ABOUT[1]]
    chat = scarce(drafts)
    for batch in (prompts, prompts[::-1], prompts[2:5]):
        check(chat.generate(batch, NEW, stop_tokens=()), batch)
        sound(chat)


@pytest.mark.sweep(guard="test_prefixes_give_way_to_texts_and_texts_still_share_them")
def test_texts_that_grow_past_their_blocks_wait_again():
    """Each decodes across the end of a block, of which there are too few for all."""
    chat, prompts = scarce(), [DOCUMENT + [i] + QUESTIONS[4][:118] for i in range(4)]
    check(chat.generate(prompts, 20, stop_tokens=()), prompts, 20)
    sound(chat)


@pytest.mark.slow
def test_prefixes_are_saved_and_restored_with_the_caches(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="saving needs the extra 'ckpt'")
    chat = generator(2, 2)
    chat.generate(ABOUT[:2], NEW, stop_tokens=())
    store, held = chat.prefixes, chat.take_caches()
    assert store is not None
    save_caches(tmp_path / "caches", held)
    store.save(tmp_path / "prefixes.npz")
    restored = restore_caches(tmp_path / "caches")
    assert isinstance(restored, Caches)
    found = PrefixStore.restore(tmp_path / "prefixes.npz", restored.model.plan)
    assert found.verify(restored.model) == []
    other = Generator(model_over(), caches=restored, prefixes=found)
    again = other.generate([ABOUT[2]], NEW, stop_tokens=())
    check(again, [ABOUT[2]])
    assert again.stored == len(QUESTIONS[2]) - 1
    with pytest.raises(ValueError, match="some of their slots are free"):
        Generator(model_over(), caches=caches(4), prefixes=found)


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
def test_choices_are_recorded_of_whole_prompts():
    chat = generator(2, 2)
    chat.generate(ABOUT[:2], NEW, stop_tokens=())
    found = chat.generate(ABOUT[2:4], NEW, stop_tokens=(), choices=True)
    check(found, ABOUT[2:4])
    assert found.stored == sum(len(prompt) - 1 for prompt in ABOUT[2:4])


def test_prefixes_need_slots_of_their_own():
    with pytest.raises(ValueError, match=r"capacity must be in \[1, 1\], got 2"):
        Generator(model_over(), caches=caches(2), prefixes=2)
    with pytest.raises(ValueError, match="prefixes must be an integer of at least 0, got -1"):
        Generator(model_over(), caches=caches(2), prefixes=-1)


# ---- over a mesh ----------------------------------------------------------------------------------------------------

ROWS = 3  # of a shard
SHORT = [question[:40] for question in QUESTIONS]
DOCUMENTS = [RNG.integers(0, CFG.vocab_size, size * CFG.attention.block_tokens).tolist() for size in (2, 1, 2)]


def generator_over(shape, drafts=0):
    """A generator whose shards have three rows each, two prefixes, and blocks for three texts about one document."""
    params, shards = model_over(shape), shape[0]
    both = caches((ROWS + 2) * shards, drafts, mesh=params.mesh, num_blocks=5 * shards)
    return Generator(params, caches=both, drafts=drafts, prefixes=2)


def meshes():
    cases = ((2, 2), 0), ((1, 2), 1), ((2, 1), 1), ((1, 2), 0), ((4, 1), 0)
    return first_of([pytest.param(*case, id=f"{case[0][0]}x{case[0][1]}, {case[1]} drafts") for case in cases], count=0)


@pytest.mark.parametrize(("shape", "drafts"), meshes())
def test_each_shard_stores_a_document_once(shape, drafts, caplog):
    chat, shards = generator_over(shape, drafts), shape[0]
    prompts = [DOCUMENTS[0] + question for question in SHORT]
    # Threads compile the programs ahead. What is logged here is what calls would compile once more.
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = chat.generate(prompts, NEW, stop_tokens=())
    assert "Finished XLA compilation of jit(run)" not in caplog.text
    check(found, prompts)
    assert found.stored == shards * len(DOCUMENTS[0]) + sum(len(question) - 1 for question in SHORT)
    assert chat.prefixes is not None
    assert sorted(prefix.slot // (ROWS + 2) for prefix in chat.prefixes.prefixes) == list(range(shards))
    sound(chat)
    # Another document is kept by one shard. Prompts about it go there, wherever more blocks are left.
    for question in (SHORT[0], SHORT[2]):
        found = chat.generate([DOCUMENTS[1] + question], NEW, stop_tokens=())
        check(found, [DOCUMENTS[1] + question])
    assert found.stored == len(SHORT[2]) - 1
    sound(chat)


@pytest.mark.sweep(guard="test_prefixes_give_way_to_texts_and_texts_still_share_them")
@pytest.mark.parametrize(("shape", "drafts"), meshes())
def test_prefixes_give_way_on_their_shard(shape, drafts, monkeypatch):
    chat, gone, drop = generator_over(shape, drafts), [], PrefixStore.drop

    def noted(store, cache, *prefixes):
        gone.extend(prefixes)
        return drop(store, cache, *prefixes)

    monkeypatch.setattr(PrefixStore, "drop", noted)
    prompts = [DOCUMENTS[i % 3] + [i % 8] * (1 + 7 * i) for i in range(4 * shape[0])]
    for batch in (prompts, prompts[::-1]):
        check(chat.generate(batch, NEW, stop_tokens=()), batch)
        sound(chat)
    assert {prefix.slot // (ROWS + 2) for prefix in gone} == set(range(shape[0]))


@pytest.mark.sweep(guard="test_prefixes_are_saved_and_restored_with_the_caches")
def test_prefixes_over_a_mesh_are_saved_and_restored_with_the_caches(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="saving needs the extra 'ckpt'")
    chat = generator_over((2, 2))
    chat.generate([DOCUMENTS[0] + SHORT[0]], NEW, stop_tokens=())
    store, held = chat.prefixes, chat.take_caches()
    assert store is not None
    save_caches(tmp_path / "caches", held)
    store.save(tmp_path / "prefixes.npz")
    restored = restore_caches(tmp_path / "caches", mesh=model_over((2, 2)).mesh)
    assert isinstance(restored, Caches)
    found = PrefixStore.restore(tmp_path / "prefixes.npz", restored.model.plan)
    assert found.verify(restored.model) == []
    with pytest.raises(ValueError, match=r"prefixes are of .* with shards=1, the caches of .* with shards=2"):
        Generator(model_over((2, 2)), caches=restored, prefixes=dataclasses.replace(found, shards=1))
    fewer = restore_caches(tmp_path / "caches", mesh=model_over((1, 2)).mesh)
    for mesh, (store, held) in {
        (2, 2): (found, restored),
        (1, 2): PrefixStore.restore_beside(tmp_path / "prefixes.npz", fewer),
    }.items():
        other = Generator(model_over(mesh), caches=held, prefixes=store)
        again = other.generate([DOCUMENTS[0] + SHORT[2]], NEW, stop_tokens=())
        check(again, [DOCUMENTS[0] + SHORT[2]])
        assert again.stored == len(SHORT[2]) - 1
