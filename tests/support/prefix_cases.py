"""A store of prefixes beside a small cache, for tests: requests that are fed, and drafts."""

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from dsv4jax.requests import PrefixStore
from tests.support.driver import CFG, LAYERS, TRAINED, ids, random_params, small_plan, step

BLOCK = CFG.block_tokens  # 16
SLOTS, CAPACITY = 6, 3
PLAN = small_plan(max_requests=SLOTS, num_blocks=12, **TRAINED)
WORDS = np.random.default_rng(0).standard_normal((8, CFG.hidden_size), np.float32)


def empty(capacity=CAPACITY, plan=PLAN, **options):
    return PrefixStore(plan, capacity, **options), d4.init_cache(plan)


def admit(cache):
    cache, slots, ok = d4.admit(cache, 1)
    assert ok
    return cache, int(slots[0])


def chunk(cache, slot, tokens):
    """Feed up to a block of tokens to a slot: (outputs, cache, ok)."""
    x = np.zeros((1, BLOCK, CFG.hidden_size), np.float32)
    x[0, : len(tokens)] = WORDS[list(tokens)]
    return step(random_params(), jnp.asarray(x), cache, ids(slot), ids(len(tokens)), layers=LAYERS)


def feed(cache, slot, tokens):
    """Feed tokens in chunks that end where blocks do, as far as the slot is at such an end."""
    for first in range(0, len(tokens), BLOCK):
        _, cache, ok = chunk(cache, slot, tokens[first : first + BLOCK])
        assert ok
    return cache


@jax.jit
def speculate(cache, slots, x, accepted):
    cache, ok = d4.prepare_forward(cache, slots, jnp.where(slots >= 0, x.shape[1], 0))
    ys, staged = [], []
    for layer in LAYERS:
        y, cache, rows = d4.stage(random_params()[layer], x, cache, layer, slots, jnp.full(1, x.shape[1], jnp.int32))
        ys.append(y)
        staged.append(rows)
    cache, committed = d4.commit(cache, staged, jnp.where(ok, accepted, 0))
    return ys, cache, ok & committed


def draft(cache, slot, tokens, accepted):
    """Draft three tokens, of which the first are accepted: (outputs, cache, ok)."""
    return speculate(cache, ids(slot), jnp.asarray(WORDS[list(tokens)][None]), ids(accepted))


def held(cache, slot):
    snapshot = d4.extract(cache, [slot])
    return snapshot.seq_lens, [snapshot.stack(kind) for kind in snapshot.kinds]


def blocks(*letters):
    """Tokens of whole blocks, each named by a number."""
    return np.concatenate([(np.arange(BLOCK) * (letter + 2) + letter) % len(WORDS) for letter in letters]).astype(int)
