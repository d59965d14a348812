"""A whole generation in one compiled program: python -m examples.generate

Prompts of different lengths wait in a queue, and the batch has one row per slot of the cache. Everything happens inside
one ``lax.while_loop``, without the host, until all texts are complete. A free row admits the next prompt, feeds it
token by token, continues with the tokens that it samples, and releases its slot and blocks at a stop token or when its
text is full. So at any time, rows may be at different places of a prompt or a continuation. Long prompts are better fed
in chunks before this loop.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

import dsv4jax as d4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A toy model: attention with residual connections, and nothing else."""

    embedding: jax.Array  # f32 [vocabulary, hidden]
    layers: tuple[d4.AttentionParams, ...]
    unembedding: jax.Array  # f32 [hidden, vocabulary]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """The queue of prompts, which become the generated texts."""

    tokens: jax.Array  # int32 [texts, longest] each prompt, then what was generated; the rest is not read
    lengths: jax.Array  # int32 [texts] number of tokens; 0 after the last prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loop:
    """What one pass of the loop hands to the next."""

    cache: d4.KVCache
    texts: Texts
    slots: jax.Array  # int32 [B] slot of each row, -1 = the row is free
    text: jax.Array  # int32 [B] text that the row works on
    waiting: jax.Array  # int32 [] first text in the queue that no row has taken
    passes: jax.Array  # int32 []
    ok: jax.Array  # bool [] True if nothing has been refused so far


def init_model(key: jax.Array, cfg: d4.DSV4Config, vocabulary: int) -> Model:
    """Return a model with random weights."""
    first, last, *keys = jax.random.split(key, 2 + cfg.num_layers)
    return Model(
        embedding=jax.random.normal(first, (vocabulary, cfg.hidden_size)),
        layers=tuple(d4.init_attention_params(key, cfg, layer) for layer, key in enumerate(keys)),
        unembedding=jax.random.normal(last, (cfg.hidden_size, vocabulary)) * cfg.hidden_size**-0.5,
    )


def normed(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def decode(
    model: Model, tokens: jax.Array, cache: d4.KVCache, slots: jax.Array
) -> tuple[jax.Array, d4.KVCache, jax.Array]:
    """Feed one token int32 [B] per row. Returns the logits of the next, f32 [B, vocabulary], the cache, and ok."""
    num_new = (slots >= 0).astype(jnp.int32)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    x = model.embedding[tokens][:, None]
    for layer, params in enumerate(model.layers):
        y, cache = d4.attention_layer(params, normed(x), cache, layer, slots, num_new)
        x = x + y
    return normed(x[:, 0]) @ model.unembedding, d4.advance(cache, slots, num_new), ok


def sample(logits: jax.Array, temperature: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw int32 [B] from softmax(logits / temperature), with one key per row.

    Temperature 0 takes the likeliest token.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.argmax(logits + temperature * noise, axis=-1).astype(jnp.int32)


def admit_waiting(loop: Loop) -> Loop:
    """Give free rows the next texts of the queue."""
    free = loop.slots < 0
    turn = loop.waiting + jnp.cumsum(free, dtype=jnp.int32) - 1
    arriving = free & (turn < jnp.sum(loop.texts.lengths > 0, dtype=jnp.int32))
    cache, slots, ok = d4.admit(loop.cache, free.size, arriving)
    return dataclasses.replace(
        loop,
        cache=cache,
        slots=jnp.where(arriving, slots, loop.slots),
        text=jnp.where(arriving, turn, loop.text),
        waiting=loop.waiting + jnp.sum(arriving, dtype=jnp.int32),
        ok=loop.ok & ok,
    )


def one_pass(model: Model, stop_token: jax.Array, temperature: jax.Array, key: jax.Array, loop: Loop) -> Loop:
    """Admit texts, feed each row one token, append the sampled token where a text is at its end, and release."""
    loop = admit_waiting(loop)
    texts, text, slots = loop.texts, loop.text, loop.slots
    count, longest = texts.lengths[text], texts.tokens.shape[1]
    position = loop.cache.seq_lens[slots]
    came_full = (slots >= 0) & (count >= longest)  # nothing can be appended: such a text is complete without being fed
    logits, cache, ok = decode(model, texts.tokens[text, position], loop.cache, jnp.where(came_full, -1, slots))

    # A row's sample depends only on its text and position, not on the other rows of the batch.
    keys = jax.vmap(lambda n, p: jax.random.fold_in(jax.random.fold_in(key, n), p))(text, position)
    drawn = sample(logits, temperature, keys)
    at_end = ok & (slots >= 0) & ~came_full & (position + 1 == count)
    target = jnp.where(at_end, text, texts.lengths.size)  # out of range, so dropped
    texts = Texts(
        tokens=texts.tokens.at[target, count].set(drawn, mode="drop"),
        lengths=texts.lengths.at[target].set(jnp.minimum(count + 1, longest), mode="drop"),
    )
    done = came_full | (at_end & ((drawn == stop_token) | (count + 1 >= longest)))
    return dataclasses.replace(
        loop,
        cache=d4.release(cache, jnp.where(done, slots, -1)),
        texts=texts,
        slots=jnp.where(done, -1, slots),
        passes=loop.passes + 1,
        ok=loop.ok & ok,
    )


@functools.partial(jax.jit, donate_argnames="cache")
def generate(
    model: Model, cache: d4.KVCache, texts: Texts, stop_token: jax.Array, temperature: jax.Array, key: jax.Array
) -> Loop:
    """Continue every text up to a stop token or its full length. Empty texts must come after all others.

    A text that is already full is returned unchanged. If blocks run out for the rows at work, the loop ends early, with
    ``ok`` False and the texts as far as they are.
    """
    rows, longest = cache.plan.max_requests, texts.tokens.shape[1]
    if longest > cache.plan.max_context + 1:  # the last token of a text is not fed
        raise ValueError(f"texts of {longest} tokens need max_context >= {longest - 1}, got {cache.plan.max_context}")
    loop = Loop(
        cache=cache,
        texts=texts,
        slots=jnp.full(rows, -1, jnp.int32),
        text=jnp.zeros(rows, jnp.int32),
        waiting=jnp.int32(0),
        passes=jnp.int32(0),
        ok=jnp.asarray(True),
    )

    def unfinished(loop: Loop) -> jax.Array:
        return loop.ok & (jnp.any(loop.slots >= 0) | (loop.waiting < jnp.sum(loop.texts.lengths > 0, dtype=jnp.int32)))

    return lax.while_loop(unfinished, functools.partial(one_pass, model, stop_token, temperature, key), loop)


def main() -> None:
    cfg, vocabulary, longest, stop_token = d4.DSV4Config.tiny(), 32, 160, 0
    model = init_model(jax.random.key(0), cfg, vocabulary)
    cache = d4.init_cache(d4.plan_cache(cfg, max_requests=3, max_context=longest))
    lengths = jnp.asarray([5, 130, 17, 40, 2, 63, 9], jnp.int32)
    prompts = jax.random.randint(jax.random.key(1), (lengths.size, longest), 1, vocabulary)
    texts = Texts(tokens=prompts, lengths=lengths)

    loop = generate(model, cache, texts, jnp.int32(stop_token), jnp.float32(1.0), jax.random.key(2))
    assert bool(loop.ok), "the cache has too few blocks"
    texts = loop.texts
    for tokens, prompt, length in zip(texts.tokens.tolist(), lengths.tolist(), texts.lengths.tolist(), strict=True):
        end = "stop token" if tokens[length - 1] == stop_token else "full"
        print(f"{prompt:>4} tokens of prompt + {length - prompt:>3}, {end}: ... {tokens[prompt:length][-12:]}")
    alone = int(jnp.sum(texts.lengths - 1))
    print(f"{int(loop.passes)} passes of {loop.slots.size} rows; {alone} one text after another")
    free = int(loop.cache.tables.num_free[0])
    print(f"{free} of {loop.cache.plan.num_blocks} blocks are free again")


if __name__ == "__main__":
    main()
