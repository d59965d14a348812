"""What stands between two sublayers, of all tokens, in one launch on Hopper.

    S'_l = post_l y + sum_j carry[j, l] S_j                    bf16; y is the output of the sublayer that is over
    number_i = sum_jd weight[i, j h + d] S'_jd / rms(S')        f32, the rms over all streams
    pre, post' = sigmoid(number * scale + base)                 + eps, times 2
    carry' = Sinkhorn's algorithm on softmax(...) + eps
    x = norm(sum_j pre_j S'_j), the sum rounded to bf16         the input of the sublayer that follows

Before the first sublayer, S' is S. Before the head there are numbers for ``pre`` alone, and the sum is given as well.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language import target
from pallas_kernels.language.lanes import Buffer, Mailbox
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.streams.mixer import (
    PART,
    STREAMS,
    WARPGROUPS,
    EndedSublayer,
    Layout,
    MixedStreams,
    Mixer,
    MixRules,
    StreamWeights,
)

SUBLAYER, HEAD = (2 + STREAMS) * STREAMS, STREAMS  # numbers of a token


def unsupported_mix(*, streams: int, hidden: int) -> str | None:
    """Return why the kernel does not serve streams [M, streams, hidden] on the device that is compiled for, or None."""
    if streams != STREAMS:
        return f"streams are mixed in fours, got {streams}"
    most = target.multiprocessors() * PART
    if hidden % PART or not 0 < hidden <= most:
        return f"hidden must be a multiple of {PART}, at most {most} on this device, got {hidden}"
    if (found := target.architecture()) != "sm90":
        return f"streams are mixed on Hopper alone, the target is {found}"
    return None


def mix_streams(
    streams: jax.Array,
    weights: StreamWeights,
    ended: EndedSublayer | None = None,
    *,
    rules: MixRules,
    simulate: bool = False,
) -> MixedStreams:
    """Add a sublayer's output to the streams of tokens, and mix them into the input of what follows.

    A token's results do not depend on the other tokens, nor on how many there are.

    Args:
      streams: bf16 [M, n, h], n = 4 and h a multiple of 64.
      weights: those of the next sublayer, or of the head, which has no gains.
      ended: the sublayer that is over; None before the first, where streams stay as they are.
      rules: the constants.
      simulate: as for ``launch``.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernel does not serve these sizes or this target.
    """
    chex.assert_rank(streams, 3)
    chex.assert_type(streams, jnp.bfloat16)
    tokens, count, hidden = streams.shape
    if (reason := unsupported_mix(streams=count, hidden=hidden)) is not None:
        raise ValueError(reason)
    numbers = _check(streams, weights, ended)
    layout = Layout.of(max(tokens, 1), hidden, numbers, target.multiprocessors())
    has_gains = numbers == SUBLAYER
    row = jax.ShapeDtypeStruct((tokens, hidden), streams.dtype)
    out = MixedStreams(
        streams=None if ended is None else jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        mixed=None if has_gains else row,
        x=row,
        post=jax.ShapeDtypeStruct((tokens, STREAMS), jnp.float32) if has_gains else None,
        carry=jax.ShapeDtypeStruct((tokens, STREAMS, STREAMS), jnp.float32) if has_gains else None,
    )
    if not tokens:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out)

    def body(
        machine: TensorCores,
        inputs: tuple[Buffer, StreamWeights, EndedSublayer | None],
        state: tuple[MixedStreams, Buffer | None],
    ) -> None:
        (streams, weights, ended), (out, stored) = inputs, state
        sums = Mailbox.open(machine, layout.mail) if stored is None else stored
        Mixer(machine, layout, rules, streams, weights, ended, out, sums).run()

    out, _ = launch(
        body,
        name="mix_streams",
        grid=Grid(
            blocks=(layout.parts, layout.groups),
            warpgroups=WARPGROUPS,
            shared_bytes=layout.shared_bytes,
            reduces=False,
        ),
        inputs=(streams, weights, ended),
        state=(out, None if layout.has_mail else jax.ShapeDtypeStruct(layout.sums, jnp.float32)),
        simulate=simulate,
    )
    return out


def _check(streams: jax.Array, weights: StreamWeights, ended: EndedSublayer | None) -> int:
    """Check the arrays against the streams, and return the numbers of a token."""
    tokens, count, hidden = streams.shape
    numbers = weights.weight.shape[0]
    if numbers not in (SUBLAYER, HEAD):
        raise ValueError(
            f"weights.weight has {SUBLAYER} rows before a sublayer and {HEAD} before the head, got {numbers}"
        )
    chex.assert_shape(weights.weight, (numbers, count * hidden))
    chex.assert_shape(
        [weights.base, weights.scale, weights.norm], [(numbers,), (3 if numbers == SUBLAYER else 1,), (hidden,)]
    )
    chex.assert_type([weights.weight, weights.base, weights.scale], jnp.float32)
    chex.assert_type(weights.norm, jnp.float32 if weights.norm.dtype == jnp.float32 else jnp.bfloat16)
    if ended is not None:
        chex.assert_shape([ended.post, ended.carry], [(tokens, count), (tokens, count, count)])
        chex.assert_type([ended.post, ended.carry], jnp.float32)
        chex.assert_shape(ended.output, (tokens, hidden))
        chex.assert_type(ended.output, jnp.bfloat16)
        if (ended.routed is None) != (ended.experts is None):
            raise ValueError("ended has routed outputs and the experts of their picks, or neither")
        if ended.routed is not None:
            picks, devices = ended.experts.shape[-1], ended.routed.shape[0]
            chex.assert_shape([ended.experts, ended.routed], [(tokens, picks), (devices, tokens, picks, hidden)])
            chex.assert_is_divisible(ended.num_experts, devices)
            chex.assert_type([ended.experts, ended.routed], [jnp.int32, jnp.bfloat16])
    return numbers
