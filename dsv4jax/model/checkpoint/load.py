"""Loading a whole model from a checkpoint's folder, weight by weight on to the device.

First ``headers`` compares the files with what the configuration says. Then weights are read and placed layer by layer.
The host never has more than the attention weights of one layer, as read and as arranged, or one other tensor, or
weights of ``READERS`` + 2 experts. These are read ahead by threads, and written one by one into an array on the device
that holds all of a layer. Over a mesh, the host has the weights of a layer but for its experts, and each device gets
its part of them; an expert is written into the array of its own device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from dsv4jax.checks import FLOATS, Tree, check_dtype
from dsv4jax.config import read_config
from dsv4jax.model.checkpoint.headers import Tensors, open_tensors
from dsv4jax.model.checkpoint.tensors import FP4_BLOCK, Place
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.inside.devices import EXPERTS_PLACE, model_mesh, weight_specs
from dsv4jax.model.inside.host_memory import check_host_experts, placed
from dsv4jax.model.params import (
    Block,
    DraftParams,
    DSparkParams,
    Experts,
    ExpertWeight,
    ModelParams,
    Router,
    StoredExperts,
    StreamMix,
)
from dsv4jax.weights.files import block_size
from dsv4jax.weights.load import NAMINGS, as_stored, as_wide, load_attention_params, scale_names
from dsv4jax.weights.params import ALWAYS_F32, AttentionParams
from dsv4jax.weights.stored import (
    CODES,
    LAYER_ACTIVATIONS,
    SCALES,
    Stored,
    Weight,
    check_activations,
    check_codes,
    check_weights,
    dtype_of,
    find_block,
    join,
)

READERS = 8  # threads that read experts ahead, of which each holds a weight of one

type Raw = tuple[np.ndarray, np.ndarray | None]  # a tensor on the host, and its scales


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How weights are held on the device."""

    weights: str  # one of WEIGHTS
    activations: str
    dtype: DTypeLike | None  # of what checkpoints store as bf16; None = as in the file

    @classmethod
    def choose(cls, weights: str, activations: str, dtype: DTypeLike | None) -> Form:
        """Return the form that the arguments of ``load_model`` name. ValueError if they name none."""
        check_weights(weights)
        check_activations("activations", activations, LAYER_ACTIVATIONS)
        if dtype is not None:
            check_dtype("dtype", dtype, FLOATS)
        if weights != "stored":
            if activations != "bf16" or dtype is not None:
                raise ValueError(f"activations and dtype are for weights='stored', got weights={weights!r}")
            dtype = dtype_of(weights)
        return cls(weights=weights, activations=activations, dtype=None if dtype is None else jnp.dtype(dtype))

    def cast(self, x: Tree, form: str) -> jax.Array:
        """Place an array that checkpoints store in a form of ``TensorSpec``."""
        if form == "int64":
            return jnp.asarray(x.astype(np.int32))
        dtype = self.dtype if form != "f32" else jnp.float32
        return jnp.asarray(x if dtype is None else x.astype(dtype))


def load_model(
    path: str | os.PathLike[str],
    weights: str = "stored",
    activations: str = "bf16",
    dtype: DTypeLike | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    mesh: Mesh | None = None,
    host_experts: int = 0,
) -> ModelParams:
    """Load a model from a folder: config.json, ``*.safetensors``, and an index where there are several.

    The folder may be DeepSeek's, or one that transformers' ``save_pretrained`` wrote, by default or with
    ``save_original_format=False``. Experts may be FP4, FP8 or floats. The block for drafts is loaded if it is there,
    by multi-token prediction (MTP) or DSpark, whose tensors tell which; one of another kind is left out.

    Args:
      path: the folder.
      weights: "stored" keeps FP8 and FP4 weights, and dtypes, as they are. "wide" multiplies FP8 and FP4 weights by
        their scales: to bfloat16 if that holds the product exactly, otherwise to float32. "bf16" and "f32" then convert
        all weights, but for what the published checkpoints store as float32.
      activations: for stored weights, "bf16", or "fp8" to round the inputs of their products as DeepSeek's own
        inference does, or "fp8_all" to round also that of W_oa; see ``StoredWeight``.
      dtype: for stored weights, that of embedding, norms and other weights that checkpoints store as bfloat16; the
        model computes in it. None = as in the file.
      on_progress: called with the bytes read so far and in all.
      mesh: several devices, with the axes "data" and "model", as ``jax.make_mesh((1, 2), ("data", "model"))``. Requests
        are divided over the first. Experts, embedding and head are divided over all devices, and the rest is on each;
        see ``dsv4jax.model.inside.devices``. None = one device.
      host_experts: how many layers, from the first on, keep their routed experts in pinned memory of the host, from
        where a pass fetches those that it picks. While a layer is read its experts are on the device. For one device.

    Raises:
      ValueError: tensors are missing, misshapen, truncated or unknown (all of this is found before anything is placed,
        and named), the configuration or an option is unknown, the mesh has other axes, experts or vocabulary do not
        divide by its devices, or ``host_experts`` is more than there are layers or meets a mesh.
      FileNotFoundError: the folder holds no config.json, or no safetensors file.
    """
    form = Form.choose(weights, activations, dtype)
    folder = Path(path)
    config = read_config(folder)
    block = block_size(config)
    tensors = open_tensors(folder, ModelConfig.from_hf(config), weights, block)
    cfg = tensors.cfg
    check_host_experts(host_experts, cfg, mesh)
    mesh = None if mesh is None else model_mesh(mesh, cfg)
    reader = _Reader(tensors, form, block, on_progress, mesh)
    outer = reader.outer
    # Over a mesh, arrays are made on the CPU, and then placed where the mesh keeps them.
    with _made_on(None if mesh is None else jax.local_devices(backend="cpu")[0]):
        params = ModelParams(
            embedding=outer("embed.weight"),
            blocks=tuple(placed(reader.block(layer), on_host=layer < host_experts) for layer in range(cfg.num_layers)),
            final_mix=reader.mix("hc_head"),
            final_norm=outer("norm.weight"),
            head=outer("head.weight"),
            drafts=reader.drafts() if reader.tensors.has_drafts else None,
            cfg=cfg,
            mesh=mesh,
        )
        return _spread(params, mesh)


def _made_on(device: Tree) -> contextlib.AbstractContextManager[object]:
    """Make arrays on a device; None is the one on which they are made anyway."""
    return contextlib.nullcontext() if device is None else jax.default_device(device)


def _spread[T](tree: T, mesh: Mesh | None) -> T:
    """Place weights that the CPU has where a mesh keeps them. What is there already stays as it is."""
    if mesh is None:
        return tree

    def place(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if leaf.sharding == sharding:
            return leaf
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.asarray(leaf)[index])

    return jax.tree.map(place, tree, weight_specs(tree, mesh))


class _Reader:
    """Reads weights and places them."""

    def __init__(
        self,
        tensors: Tensors,
        form: Form,
        block: tuple[int, int] | None,
        on_progress: Callable[[int, int], None] | None,
        mesh: Mesh | None,
    ) -> None:
        self.tensors, self.cfg, self.form, self.block_size = tensors, tensors.cfg, form, block
        self._mesh = mesh
        self._on_progress, self._done = on_progress, 0

    def _read(self, place: Place) -> np.ndarray:
        tensor = self.tensors.files[place.name]
        if place.expert is None:
            return tensor.read()
        assert place.rows is not None
        height = tensor.shape[1]  # rows of the tensor or of its scales
        of = self.tensors.files[place.name.removesuffix("_scale_inv")].shape[1]
        first, end = (row * height // of for row in place.rows)
        return tensor.read(place.expert, 1)[0, first:end]

    def _count(self, raw: Raw) -> None:
        """Say that a tensor and its scales were read."""
        given, scale = raw
        self._done += given.nbytes if scale is None else given.nbytes + scale.nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self.tensors.nbytes)

    def _raw(self, name: str) -> Raw:
        """Read a tensor and its scales, by DeepSeek's name."""
        scale = self.tensors.scale(name)
        return self._read(self.tensors.places[name]), None if scale is None else self._read(scale)

    def _next(self, name: str) -> Raw:
        """As ``_raw``, and counted."""
        raw = self._raw(name)
        self._count(raw)
        return raw

    def outer(self, name: str) -> jax.Array:
        """Place a tensor that is not quantised."""
        given, form = self._next(name)[0], self.tensors.specs[name].form
        if form == "int64" and not (given.min() >= 0 and given.max() < self.cfg.num_experts):
            raise ValueError(f"{self._named(name)} names experts that are not in [0, {self.cfg.num_experts})")
        return self.form.cast(given, form)

    def _named(self, name: str) -> str:
        return f"tensor {self.tensors.places[name].name!r}"

    def weight(self, *names: str) -> Weight:
        """Place linear weights, side by side."""
        parts: list[Tree] = []
        for name in names:
            given, scale = self._next(name)
            try:
                if self.form.weights == "stored" and scale is not None:
                    stored = Stored(block=self.block_size, activations=self.form.activations)
                    parts.append(as_stored(given, scale, stored, stored.of(name)))
                else:
                    parts.append(self.form.cast(as_wide(given, scale, self.block_size), "bf16"))
            except ValueError as error:
                raise ValueError(f"{self._named(name)}{error}") from error
        try:
            return jax.tree.map(jnp.asarray, join(*parts))
        except ValueError as error:
            raise ValueError(f"{' and '.join(map(self._named, names))}: {error}") from error

    def mix(self, name: str) -> StreamMix:
        """Place the weights that mix streams."""
        return StreamMix(
            weight=self.outer(f"{name}_fn"), base=self.outer(f"{name}_base"), scale=self.outer(f"{name}_scale")
        )

    def attention(self, prefix: str, layer: int | None) -> AttentionParams:
        """Place the attention weights of a layer; None means the draft block."""
        cfg = self.cfg.draft_attention if layer is None else self.cfg.attention
        raw: dict[str, np.ndarray] = {}
        for name in NAMINGS["deepseek"].values():
            if f"{prefix}attn.{name}" not in self.tensors.specs:
                continue
            raw[name], scale = self._next(f"{prefix}attn.{name}")
            if scale is not None:
                raw[scale_names(name)[0]] = scale
        # What is float32 in published checkpoints need not be so in the file.
        options = ("stored", self.form.activations) if self.form.weights == "stored" else ("wide", "bf16")
        try:
            params = load_attention_params(raw, cfg, layer or 0, "deepseek", *options, self.block_size)
        except ValueError as error:
            if layer is None:  # the message says layer 0, of the draft block's one
                raise ValueError(f"draft block, {error}") from error
            raise

        def cast(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
            if leaf.dtype.itemsize == 1:
                return leaf
            return self.form.cast(leaf, "f32" if path[-1].name in ALWAYS_F32 else "bf16")

        return jax.tree_util.tree_map_with_path(cast, params)

    def block(self, layer: int) -> Block:
        """Place a layer of the model."""
        return self._block(f"layers.{layer}.", layer)

    def _block(self, prefix: str, layer: int | None) -> Block:
        """Place a layer whose names begin with a prefix; None means one of the draft block."""

        def of(name: str) -> jax.Array | None:
            return self.outer(prefix + name) if prefix + name in self.tensors.specs else None

        block = Block(
            attention=self.attention(prefix, layer),
            attention_mix=self.mix(f"{prefix}hc_attn"),
            attention_norm=self.outer(f"{prefix}attn_norm.weight"),
            router=Router(
                gate=self.outer(f"{prefix}ffn.gate.weight"), bias=of("ffn.gate.bias"), table=of("ffn.gate.tid2eid")
            ),
            experts=Experts(
                gate_up=self.experts(prefix, "w1", "w3"),
                down=self.experts(prefix, "w2"),
                shared_gate_up=self.weight(*(f"{prefix}ffn.shared_experts.{w}.weight" for w in ("w1", "w3"))),
                shared_down=self.weight(f"{prefix}ffn.shared_experts.w2.weight"),
            ),
            experts_mix=self.mix(f"{prefix}hc_ffn"),
            experts_norm=self.outer(f"{prefix}ffn_norm.weight"),
        )
        return _spread(block, self._mesh)

    def drafts(self) -> DraftParams | DSparkParams:
        """Place the block for drafts."""
        return self._mtp() if self.cfg.dspark is None else self._dspark(self.cfg.dspark.stages)

    def _dspark(self, stages: int) -> DSparkParams:
        last = f"mtp.{stages - 1}."
        return DSparkParams(
            taps_proj=self.weight("mtp.0.main_proj.weight"),
            taps_norm=self.outer("mtp.0.main_norm.weight"),
            blocks=tuple(self._block(f"mtp.{stage}.", None) for stage in range(stages)),
            final_mix=self.mix(f"{last}hc_head"),
            final_norm=self.outer(f"{last}norm.weight"),
            markov_in=self.outer(f"{last}markov_head.markov_w1.weight"),
            markov_out=self.outer(f"{last}markov_head.markov_w2.weight"),
            confidence=self.outer(f"{last}confidence_head.proj.weight"),
        )

    def _mtp(self) -> DraftParams:
        return DraftParams(
            token_norm=self.outer("mtp.0.enorm.weight"),
            stream_norm=self.outer("mtp.0.hnorm.weight"),
            token_proj=self.weight("mtp.0.e_proj.weight"),
            stream_proj=self.weight("mtp.0.h_proj.weight"),
            block=self._block("mtp.0.", None),
            final_mix=self.mix("mtp.0.hc_head"),
            final_norm=self.outer("mtp.0.norm.weight"),
        )

    def experts(self, prefix: str, *names: str) -> ExpertWeight:
        """Place one weight of all experts of a layer, or two side by side, an expert at a time."""
        devices, experts = zip(*self._shares(), strict=True)
        count = len(experts[0])  # as many as each device has
        parts = [
            (f"{prefix}ffn.experts.{experts[share][place]}.{weight}.weight", share, place, side)
            for place in range(count)
            for share in range(len(devices))  # in turns, so that copies to one go on beside those to another
            for side, weight in enumerate(names)
        ]

        def read(part: tuple[str, int, int, int]) -> tuple[Raw, ExpertWeight]:
            raw = self._raw(part[0])
            with _made_on(devices[part[1]]):
                return raw, self._expert(part[0], *raw)

        buffers: list[ExpertWeight] = []  # of each device
        first = None
        for (name, share, place, side), (raw, as_read) in zip(parts, _ahead(read, parts), strict=True):
            self._count(raw)
            with _made_on(devices[share]):  # to put a weight in the kernels' order takes the host long
                expert = self._as_held(as_read)
                first = first or _forms(expert)
                if _forms(expert) != first:
                    raise ValueError(f"{self._named(name)} is stored unlike the first expert")
                if len(buffers) == share:
                    buffers.append(_room(expert, count, len(names)))
                buffers[share] = _put(buffers[share], expert, np.int32(place), np.int32(side))
            jax.block_until_ready(as_read)  # until then the host holds it, too
        return buffers[0] if self._mesh is None else jax.tree.map(functools.partial(_joined, self._mesh), *buffers)

    def _shares(self) -> list[tuple[Tree, range]]:
        """Which experts each of this process's devices holds. None is JAX's first device."""
        count = self.cfg.num_experts
        if self._mesh is None:
            return [(jax.config.jax_default_device, range(count))]  # the caller's, in other threads too
        places = NamedSharding(self._mesh, EXPERTS_PLACE).addressable_devices_indices_map((count,))
        return [(device, range(*which[0].indices(count))) for device, which in places.items() if which is not None]

    def _expert(self, name: str, given: np.ndarray, scale: np.ndarray | None) -> ExpertWeight:
        """Place one weight of one expert, [1, out, in], as it is in the file."""
        if scale is None:
            return self.form.cast(given[None], "bf16")
        rows, columns = self.tensors.specs[name].shape
        if given.dtype == CODES:
            try:
                check_codes(given)
                block = find_block((rows, columns), scale.shape, self.block_size)
            except ValueError as error:
                raise ValueError(f"{self._named(name)}: {error}") from error
        else:
            given, block = given.view(np.uint8), FP4_BLOCK
        return StoredExperts(
            codes=jnp.asarray(given[None]),
            scales=jnp.asarray(scale[None]),
            block=block,
            activations=Stored(activations=self.form.activations).of("experts"),
        )

    def _as_held(self, part: ExpertWeight) -> ExpertWeight:
        """The weight of an expert in the order of the kernels, or as wide as was asked for."""
        if not isinstance(part, StoredExperts):
            return part
        if self.form.weights == "stored":
            return part.for_kernels()
        exact = jnp.bfloat16 if part.scales.dtype == SCALES else jnp.float32
        return part.widened(jnp.zeros(1, jnp.int32), exact if self.form.dtype is None else self.form.dtype)


def _ahead[A, R](work: Callable[[A], R], given: Iterable[A]) -> Iterator[R]:
    """Yield ``work`` of each in their order, while threads work on the ``READERS`` that follow."""
    with ThreadPoolExecutor(READERS) as threads:
        running: collections.deque[Future[R]] = collections.deque()
        for each in given:
            running.append(threads.submit(work, each))
            if len(running) > READERS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _room(part: ExpertWeight, experts: int, sides: int) -> ExpertWeight:
    """Zeros for all experts of weights [1, out, in], of which ``sides`` stand side by side."""
    return jax.tree.map(lambda leaf: jnp.zeros((experts, leaf.shape[1] * sides, leaf.shape[2]), leaf.dtype), part)


def _forms(part: ExpertWeight) -> tuple[Tree, list[Tree]]:
    return jax.tree.structure(part), [leaf.dtype for leaf in jax.tree.leaves(part)]


def _joined(mesh: Mesh, *parts: jax.Array) -> jax.Array:
    """The array over a mesh whose parts on this process's devices these are."""
    shape = parts[0].shape[0] * mesh.size, *parts[0].shape[1:]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, EXPERTS_PLACE), parts)


@functools.partial(jax.jit, donate_argnums=0)
def _put(buffer: ExpertWeight, part: ExpertWeight, expert: jax.Array, side: jax.Array) -> ExpertWeight:
    """Write a weight of one expert into the array of all."""

    def put(leaf: jax.Array, rows: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(leaf, rows, (expert, side * rows.shape[1], jnp.int32(0)))

    return jax.tree.map(put, buffer, part)
