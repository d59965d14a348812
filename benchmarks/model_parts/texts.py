"""How texts are timed: one after another, by the loop that generates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dsv4jax.model import Generator, ModelParams

ROUNDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Milliseconds of wall of one text."""

    first: float  # from the prompt to the first new token
    again: float  # the same prompt once more, from the cache, to the last of the new tokens
    passes: int  # of these new tokens


def time_texts(params: ModelParams, context: int, new: int) -> Iterator[Text]:
    """Time prompts of ``context`` random tokens, and ``new`` tokens after each.

    Yields ``ROUNDS`` texts, after one that is dropped because it includes what is done once.
    """
    generator = Generator(params, 1, context + new + 1)
    prompts = np.random.default_rng(3).integers(0, params.cfg.vocab_size, (1 + ROUNDS, context))
    for number, prompt in enumerate(prompts):
        generator.generate([prompt], 1, stop_tokens=[])
        first, (tokens,) = generator.result.seconds, generator.result.tokens
        again = generator.generate([[*prompt.tolist(), *tokens]], new, stop_tokens=[])
        assert again.stored == 0, "the prompt is still in the cache"
        if number:
            yield Text(first=first * 1e3, again=again.seconds * 1e3, passes=again.passes)
