"""Texts of a generator that keeps prefixes are those of one that does not; documents are stored once."""

import functools

import numpy as np
import pytest

from dsv4jax.model import Caches, Generator, Sampling, init_caches, restore_caches, save_caches
from dsv4jax.requests import PrefixStore
from tests.support.cases import first_of
from tests.support.models import FULL, SMALL, small_model

CONTEXT = 512
VOCABULARY = SMALL.vocab_size
RNG = np.random.default_rng(0)
DOCUMENT = RNG.integers(0, VOCABULARY, 256).tolist()
QUESTIONS = [RNG.integers(0, VOCABULARY, n).tolist() for n in (3, 1, 40, 7, 118)]
ABOUT = [DOCUMENT + question for question in QUESTIONS]
NEW = 6


def caches(rows, drafts=0, **options):
    return init_caches(SMALL, rows, CONTEXT, drafts, **(FULL | options))


def generator(rows, prefixes, drafts=0, **options):
    both = caches(rows + prefixes, drafts, **options)
    return Generator(small_model(), caches=both, drafts=drafts, prefixes=prefixes)


@functools.cache
def plain(prompts, max_new=NEW):
    return generator(2, 0).generate([list(prompt) for prompt in prompts], max_new, stop_tokens=()).tokens


def check(found, prompts, max_new=NEW):
    wanted = [plain((tuple(prompt),), max_new)[0] for prompt in prompts]
    assert found.tokens == wanted


def sound(chat):
    held = chat._caches
    assert chat.prefixes.verify(held.model) == []
    if held.drafts is not None:
        assert np.array_equal(held.drafts.tables.admitted, held.model.tables.admitted)
        assert np.array_equal(held.drafts.seq_lens, held.model.seq_lens)


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


@pytest.mark.sweep(guard="test_a_document_is_stored_once")
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
    other = RNG.integers(0, VOCABULARY, 200).tolist()
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
    other = Generator(small_model(), caches=restored, prefixes=found)
    again = other.generate([ABOUT[2]], NEW, stop_tokens=())
    check(again, [ABOUT[2]])
    assert again.stored == len(QUESTIONS[2]) - 1
    with pytest.raises(ValueError, match="some of their slots are free"):
        Generator(small_model(), caches=caches(4), prefixes=found)


@pytest.mark.sweep(guard="test_the_choices_of_a_rollout_are_those_of_one_pass_over_its_text")
def test_choices_are_recorded_of_whole_prompts():
    chat = generator(2, 2)
    chat.generate(ABOUT[:2], NEW, stop_tokens=())
    found = chat.generate(ABOUT[2:4], NEW, stop_tokens=(), choices=True)
    check(found, ABOUT[2:4])
    assert found.stored == sum(len(prompt) - 1 for prompt in ABOUT[2:4])


def test_prefixes_need_slots_of_their_own():
    with pytest.raises(ValueError, match=r"capacity must be in \[1, 1\], got 2"):
        Generator(small_model(), caches=caches(2), prefixes=2)
    with pytest.raises(ValueError, match="prefixes must be an integer of at least 0, got -1"):
        Generator(small_model(), caches=caches(2), prefixes=-1)
