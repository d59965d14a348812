"""Saving a whole model to a folder, in the names and forms of DeepSeek's checkpoints.

Weights that a model holds side by side are cut apart again. On the host there is never more than one layer's attention
or one other tensor.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from dsv4jax.cache.shards import is_held_here, on_host
from dsv4jax.checks import Tree, check_concrete, integer
from dsv4jax.config import Json, layer_schedule
from dsv4jax.model.params import (
    Block,
    DraftParams,
    DSparkParams,
    ExpertWeight,
    ModelParams,
    StoredExperts,
    StreamMix,
    check_model,
    is_any_stored,
)
from dsv4jax.weights.deltas import WeightWithDelta, has_delta
from dsv4jax.weights.files import NewTensor, write_file
from dsv4jax.weights.load import NAMINGS, scale_names
from dsv4jax.weights.params import check_params
from dsv4jax.weights.stored import StoredWeight, Weight, as_bytes, num_blocks, rows_of


def save_model(params: ModelParams, path: str | os.PathLike[str], max_file_bytes: int = 5 << 30) -> None:
    """Write a model to a new folder: config.json, ``*.safetensors``, and an index where there are several.

    ``load_model(path)`` returns the same weights bit for bit, in the same forms: FP8 and FP4 with their scales, bf16,
    f32. Two things are not in a checkpoint, and are options of ``load_model``: ``activations``; and another dtype than
    float32 of what checkpoints always store as float32. A tokenizer is not saved: copy its files from the folder that
    the model came from. A save that fails leaves nothing; one that is killed leaves ``path.partial``.

    Where several processes hold parts of the weights, all of them make this call. The first one writes, and is sent one
    tensor at a time; the others come back when it has finished.

    Args:
      params: the model's weights.
      path: the folder. There may be an empty one.
      max_file_bytes: how large a file may become. A tensor that is larger has a file of its own.

    Raises:
      FileExistsError: the folder exists and is not empty, or another save was killed; nothing is overwritten.
      ValueError: the weights are traced, or have low-rank deltas, or their FP8 blocks differ in
        size, where a checkpoint has one size.
      AssertionError: (chex) a weight's shape or dtype is wrong.
    """
    check_concrete("save_model", params, "call it on weights that have come back")
    integer("max_file_bytes", max_file_bytes, least=1)
    check_model(params)
    if any(map(has_delta, jax.tree.leaves(params, is_leaf=has_delta))):
        raise ValueError("params have low-rank deltas: save_deltas has a file for them, merge_deltas adds them up")
    cfg = params.cfg
    for block, spec in zip(params.blocks, layer_schedule(cfg.attention), strict=True):
        check_params(block.attention, cfg.attention, spec.attn)
    for block in () if params.drafts is None else params.drafts.blocks:
        check_params(block.attention, cfg.draft_attention, layer_schedule(cfg.draft_attention)[0].attn)
    tensors = _Tensors(params)
    with _folder_of_all(path, params) as folder:
        if folder is None:
            for tensor in tensors.found.values():
                tensor.make()  # which sends it
            return
        _write(folder, tensors.found, max_file_bytes)
        (folder / "config.json").write_text(json.dumps(tensors.config(), indent=2) + "\n")


@contextlib.contextmanager
def _folder_of_all(path: str | os.PathLike[str], params: ModelParams) -> Generator[Path | None]:
    """Make a folder as ``new_folder`` does: of processes that share weights the first one, and None is for the others.

    All of them raise an error if it cannot be made, and leave together.
    """
    if is_held_here(params):
        with new_folder(path) as folder:
            yield folder
        return
    with contextlib.ExitStack() as stack:
        folder, error = None, None
        if jax.process_index() == 0:
            try:
                folder = stack.enter_context(new_folder(path))
            except OSError as found:
                error = found
        if not multihost_utils.broadcast_one_to_all(np.bool_(error is None)):
            raise error or FileExistsError(f"the first process cannot make {path}")
        yield folder
    multihost_utils.sync_global_devices("save_model")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Generator[Path]:
    """Make a folder under another name, to be written, which gets its own when that went well and else goes.

    Raises:
      FileExistsError: the folder exists and is not empty, or another save was killed.
    """
    folder = Path(path).absolute()
    partial = folder.with_name(folder.name + ".partial")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: save to a new folder")
    if partial.exists():
        raise FileExistsError(f"{partial} was left by a save that was killed: remove it")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _write(folder: Path, tensors: dict[str, NewTensor], max_file_bytes: int) -> None:
    files: list[dict[str, NewTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > max_file_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    if len(files) == 1:
        write_file(folder / "model.safetensors", files[0])
        return
    where: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        write_file(folder / file, held)
        where |= dict.fromkeys(held, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class _Tensors:
    """The tensors of a model by DeepSeek's names."""

    def __init__(self, params: ModelParams) -> None:
        self.cfg = params.cfg
        self.block_size = _block_size(params)
        self.has_drafts, self.has_fp4 = params.drafts is not None, _has_fp4(params)
        self.found: dict[str, NewTensor] = {}
        for name, array in (
            ("embed.weight", params.embedding),
            ("norm.weight", params.final_norm),
            ("head.weight", params.head),
        ):
            self.put(name, lambda array=array: array)
        self.mix("hc_head", params.final_mix)
        for layer, block in enumerate(params.blocks):
            self.block(f"layers.{layer}.", block)
        if params.drafts is not None:
            self.drafts(params.drafts)

    def config(self) -> dict[str, Json]:
        """The content of config.json."""
        config = self.cfg.to_hf()
        if self.has_drafts:
            config["num_nextn_predict_layers"] = 1
            if self.cfg.dspark is None:  # DeepSeek appends the ratio of the block for drafts
                config["compress_ratios"] += [0]
        if self.has_fp4:
            config["expert_dtype"] = "fp4"
        if self.block_size is not None:
            block = list(self.block_size)
            config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
        return config

    def put(self, name: str, get: Callable[[], Weight]) -> None:
        """Note a weight that ``get`` returns, an array or stored."""
        spec = jax.eval_shape(get)
        if not isinstance(spec, StoredWeight):
            self.found[name] = _tensor(spec, get)
            return
        assert self.block_size is not None
        height, width = self.block_size

        def stored() -> StoredWeight:
            weight = get()
            assert isinstance(weight, StoredWeight)
            return weight

        self.found[name] = _tensor(spec.codes, lambda: stored().codes)
        scales = jax.ShapeDtypeStruct(num_blocks((spec.shape[0], spec.shape[1]), (height, width)), spec.scales.dtype)
        self.found[scale_names(name)[0]] = _tensor(scales, lambda: _raised(name, stored(), height))

    def mix(self, name: str, mix: StreamMix) -> None:
        for part, array in (("fn", mix.weight), ("base", mix.base), ("scale", mix.scale)):
            self.put(f"{name}_{part}", lambda array=array: array)

    def block(self, prefix: str, block: Block) -> None:
        """Note the weights of a layer."""
        for part in jax.eval_shape(block.attention.split):
            name = f"{prefix}attn.{NAMINGS['deepseek'][part]}"
            self.put(name, lambda part=part: block.attention.split()[part])
        self.mix(f"{prefix}hc_attn", block.attention_mix)
        self.mix(f"{prefix}hc_ffn", block.experts_mix)
        for name, array in (
            ("attn_norm.weight", block.attention_norm),
            ("ffn_norm.weight", block.experts_norm),
            ("ffn.gate.weight", block.router.gate),
            ("ffn.gate.bias", block.router.bias),
            ("ffn.gate.tid2eid", block.router.table),
        ):
            if array is not None:
                self.put(prefix + name, lambda array=array: array)
        wide, shared = self.cfg.expert_width, f"{prefix}ffn.shared_experts."
        gate_up, down = block.experts.shared_gate_up, block.experts.shared_down
        self.put(f"{shared}w1.weight", lambda: rows_of(gate_up, 0, wide))
        self.put(f"{shared}w2.weight", lambda: down)
        self.put(f"{shared}w3.weight", lambda: rows_of(gate_up, wide, 2 * wide))
        for expert in range(self.cfg.num_experts):
            for weight, both, first in (
                ("w1", block.experts.gate_up, 0),
                ("w2", block.experts.down, None),
                ("w3", block.experts.gate_up, wide),
            ):
                rows = both.shape[1] if first is None else wide
                self.expert(f"{prefix}ffn.experts.{expert}.{weight}.weight", both, expert, first or 0, rows)

    def expert(self, name: str, weight: ExpertWeight, expert: int, first: int, rows: int) -> None:
        """Note some rows of one expert."""

        def put(
            name: str, leaf: jax.Array, height: int, written: Callable[[jax.Array], jax.Array] = lambda rows: rows
        ) -> None:
            """``height`` rows of the weight are one of the leaf, which are written as ``written`` returns them."""
            count, start = -(-rows // height), first // height
            spec = jax.ShapeDtypeStruct((count, leaf.shape[2]), leaf.dtype)
            index = np.int32(expert), np.int32(start)
            self.found[name] = _tensor(spec, lambda: written(_rows_of_expert(leaf, *index, count=count)))

        assert not isinstance(weight, WeightWithDelta), "save_model refuses them"
        if not isinstance(weight, StoredExperts):
            put(name, weight, 1)
            return
        put(name, weight.codes, 1, weight.in_order)
        put(scale_names(name)[0], weight.scales, weight.block[0])

    def drafts(self, drafts: DraftParams | DSparkParams) -> None:
        """Note the weights of the block for drafts."""
        last = f"mtp.{len(drafts.blocks) - 1}."
        self.put(f"{last}norm.weight", lambda: drafts.final_norm)
        self.mix(f"{last}hc_head", drafts.final_mix)
        for stage, block in enumerate(drafts.blocks):
            self.block(f"mtp.{stage}.", block)
        if isinstance(drafts, DSparkParams):
            named: tuple[tuple[str, Weight], ...] = (
                ("mtp.0.main_proj.weight", drafts.taps_proj),
                ("mtp.0.main_norm.weight", drafts.taps_norm),
                (f"{last}markov_head.markov_w1.weight", drafts.markov_in),
                (f"{last}markov_head.markov_w2.weight", drafts.markov_out),
                (f"{last}confidence_head.proj.weight", drafts.confidence),
            )
        else:
            named = (
                ("mtp.0.enorm.weight", drafts.token_norm),
                ("mtp.0.hnorm.weight", drafts.stream_norm),
                ("mtp.0.e_proj.weight", drafts.token_proj),
                ("mtp.0.h_proj.weight", drafts.stream_proj),
            )
        for name, weight in named:
            self.put(name, lambda weight=weight: weight)


def _tensor(spec: Tree, get: Callable[[], Tree]) -> NewTensor:
    """A tensor as it is in files: integers are int64, and FP4 codes, which are bytes, int8."""
    as_in_files = {jnp.dtype(jnp.int32): np.dtype(np.int64), jnp.dtype(jnp.uint8): np.dtype(np.int8)}
    dtype = as_in_files.get(spec.dtype, np.dtype(spec.dtype))

    def make() -> np.ndarray:
        given = on_host(jnp.copy(get()))  # a copy, because JAX keeps what it has brought to the host
        return given.view(dtype) if dtype.itemsize == given.dtype.itemsize else given.astype(dtype)

    return NewTensor(dtype=dtype, shape=spec.shape, make=make)


@functools.partial(jax.jit, static_argnames="count")
def _rows_of_expert(leaf: jax.Array, expert: jax.Array, first: jax.Array, *, count: int) -> jax.Array:
    """Rows of one expert [count, in] of a leaf [E, rows, in], cut as bytes if they are 8-bit floats."""
    rows = as_bytes(leaf) if leaf.dtype.itemsize == 1 else leaf
    rows = lax.dynamic_slice(rows, (expert, first, 0), (1, count, leaf.shape[2]))[0]
    return lax.bitcast_convert_type(rows, leaf.dtype) if leaf.dtype.itemsize == 1 else rows


def _raised(name: str, weight: StoredWeight, height: int) -> np.ndarray:
    """The scales of a weight for blocks of ``height`` rows, where it may have lower ones since it was joined.

    Raises ValueError if rows of such a block have different scales.
    """
    scales, times = on_host(weight.scales), height // weight.block[0]
    raised = scales[::times]
    if np.repeat(raised, times, 0)[: len(scales)].tobytes() != scales.tobytes():
        raise ValueError(f"{name}: {weight.block[0]} rows share scales, and {height} do in the model's other weights")
    return raised


def _block_size(params: ModelParams) -> tuple[int, int] | None:
    """The rows and columns per scale of a model's FP8 weights; None if it has none.

    Weights that were joined may have lower blocks, of which those of the others are multiples.
    """
    blocks = {
        node.block
        for node in jax.tree.leaves(params, is_leaf=is_any_stored)
        if isinstance(node, StoredWeight) or (isinstance(node, StoredExperts) and not node.is_fp4)
    }
    if not blocks:
        return None
    height, width = max(height for height, _ in blocks), max(width for _, width in blocks)
    if any(height % lower or width != other for lower, other in blocks):
        raise ValueError(f"FP8 weights are stored in blocks of {sorted(blocks)}: a checkpoint has blocks of one size")
    return height, width


def _has_fp4(params: ModelParams) -> bool:
    nodes = jax.tree.leaves(params, is_leaf=is_any_stored)
    return any(isinstance(node, StoredExperts) and node.is_fp4 for node in nodes)
