"""Low-rank deltas in files, under PEFT's names for transformers' model: what ``peft`` writes and reads.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. In the latter are, for every weight,

    base_model.model.{module}.lora_A.weight    [rank, in]
    base_model.model.{module}.lora_B.weight    [out, rank]

where the module is one of transformers' DeepseekV4ForCausalLM. Those of all experts of a layer are parameters of one
module: A is [E * rank, in], expert by expert, and B [out, rank * E], of which E is the fastest. If both parameters have
one, the module of ``gate_up_proj`` is called ``experts.base_layer``. So it is in PEFT since 0.19.1; before that, PEFT
took the two axes of an expert's weight for one another.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dsv4jax.checks import check_concrete, check_type, real
from dsv4jax.config import Json, read_config
from dsv4jax.model.checkpoint.save import new_folder
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.deltas import Target, add_deltas, deltas_of, targets_of
from dsv4jax.model.params import ModelParams
from dsv4jax.weights.deltas import Delta
from dsv4jax.weights.files import FileTensor, NewTensor, read_header, write_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_EXPERTS, _NESTED = "mlp.experts", "mlp.experts.base_layer"
_PARAMETERS = {"mlp.gate": "mlp.gate.weight"}  # what transformers holds as a parameter, not as a linear module
# What PEFT can do besides, and this library does not. A file that asks for it is refused.
_ABSENT: dict[str, Json] = {
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "use_qalora"), (None, False, [])),
    "bias": (None, "none"),
    "peft_type": ("LORA",),
}


def save_deltas(params: ModelParams, path: str | os.PathLike[str]) -> None:
    """Write the low-rank deltas of a model to a new folder, in PEFT's names and shapes.

    ``load_deltas`` gives the same numbers back, bit for bit. The model's own weights are not written.

    Args:
      params: a model with deltas.
      path: the folder. There may be an empty one.

    Raises:
      FileExistsError: the folder exists and is not empty, or another save was killed; nothing is overwritten.
      ValueError: the model has no deltas, or they are traced.
    """
    check_type("params", params, ModelParams)
    deltas = deltas_of(params)
    if not deltas:
        raise ValueError("params have no low-rank deltas: with_deltas adds them")
    check_concrete("save_deltas", list(deltas.values()), "call it on weights that have come back")
    tensors: dict[str, NewTensor] = {}
    for target, delta in deltas.items():
        module = _module(target, deltas)
        tensors[f"{_PREFIX}{module}{_DOWN}"] = _tensor(functools.partial(_down_rows, delta))
        tensors[f"{_PREFIX}{module}{_UP}"] = _tensor(functools.partial(_up_columns, delta))
    with new_folder(path) as folder:
        write_file(folder / TENSORS, tensors)
        (folder / CONFIG).write_text(json.dumps(_config(params.cfg, deltas), indent=2) + "\n")


def load_deltas(params: ModelParams, path: str | os.PathLike[str]) -> ModelParams:
    """Return a model with the low-rank deltas of a folder that ``save_deltas`` or PEFT wrote.

    Args:
      params: the weights of the model that the deltas are for, without deltas on the same weights.
      path: the folder.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a tensor is of no weight of this model, lacks the other one, or has a shape that does not fit, or the
        configuration cannot be read, lacks ``lora_alpha``, or asks for more than low-rank deltas; the message names it.
        Or a weight has a delta already.
      AssertionError: (chex) the tensors are neither f32 nor bf16.
    """
    check_type("params", params, ModelParams)
    folder = Path(path)
    config = read_config(folder / CONFIG)
    if "lora_alpha" not in config:
        raise ValueError(f"{folder / CONFIG} lacks 'lora_alpha'")
    for key, known in _ABSENT.items():
        if config.get(key, known[0]) not in known:
            raise ValueError(f"{folder / CONFIG} has {key}={config[key]!r}, which is not served")
    if not (folder / TENSORS).exists():
        raise FileNotFoundError(f"no {folder / TENSORS}")
    pairs = _pairs(read_header(folder / TENSORS), folder)
    known = {target.full_module: target for target in targets_of(params.cfg)}
    found: dict[Target, Delta] = {}
    for module, (down, up) in pairs.items():
        target = _target(module, down, up, known)
        if target is None:
            shapes = f"lora_A {list(down.shape)} and lora_B {list(up.shape)}"
            raise ValueError(f"{folder / TENSORS}: no weight of this model takes {module!r} with {shapes}")
        found[target] = _delta(target, down.read(), up.read(), config)
    return add_deltas(params, found)


def _module(target: Target, deltas: Iterable[Target]) -> str:
    """The module under which PEFT saves a delta of a target."""
    if not target.name.startswith("experts."):
        return target.full_module
    of_layer = {other.name for other in deltas if other.layer == target.layer}
    is_nested = target.name == "experts.gate_up" and "experts.down" in of_layer
    return f"model.layers.{target.layer}.{_NESTED if is_nested else _EXPERTS}"


def _tensor(make: Callable[[], np.ndarray]) -> NewTensor:
    made = make()
    return NewTensor(dtype=made.dtype, shape=made.shape, make=make)


def _down_rows(delta: Delta) -> np.ndarray:
    down = np.asarray(delta.down)
    return down.reshape(-1, down.shape[-1])


def _up_columns(delta: Delta) -> np.ndarray:
    up = np.asarray(delta.up)
    return up if up.ndim == 2 else np.moveaxis(up, 0, -1).reshape(up.shape[1], -1)


def _delta(target: Target, down: np.ndarray, up: np.ndarray, config: Mapping[str, Json]) -> Delta:
    *experts, rows, inputs = target.shape
    if experts:
        down = down.reshape(*experts, -1, inputs)
        up = np.moveaxis(up.reshape(rows, -1, *experts), -1, 0)
    rank = down.shape[-2]
    found = _of_pattern(config.get("alpha_pattern") or {}, target, config["lora_alpha"])
    alpha = real(f"{CONFIG}: the alpha of {target.full_module}", found)
    if config.get("use_rslora"):
        alpha *= rank**0.5
    return Delta(down=jnp.asarray(down), up=jnp.asarray(up), first=target.first, alpha=alpha)


def _of_pattern(patterns: Mapping[str, Json], target: Target, otherwise: Json) -> Json:
    """What the first pattern says that the end of a target's name matches, as PEFT reads it."""
    name = _PARAMETERS.get(target.module, target.module)
    full = target.full_module.removesuffix(target.module) + name
    return next((value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", full)), otherwise)


def _pairs(tensors: Mapping[str, FileTensor], folder: Path) -> dict[str, tuple[FileTensor, FileTensor]]:
    """Both tensors of each module."""
    halves: dict[str, dict[str, FileTensor]] = collections.defaultdict(dict)
    for name, tensor in tensors.items():
        half = next((half for half in (_DOWN, _UP) if name.endswith(half)), None)
        if half is None or not name.startswith(_PREFIX):
            raise ValueError(f"{folder / TENSORS}: {name!r} is no factor of a low-rank delta")
        halves[name.removeprefix(_PREFIX).removesuffix(half)][half] = tensor
    for module, of_module in halves.items():
        if len(of_module) == 1:
            raise ValueError(f"{folder / TENSORS}: {module!r} has {next(iter(of_module))[1:]!r} alone")
    return {module: (of_module[_DOWN], of_module[_UP]) for module, of_module in halves.items()}


def _target(module: str, down: FileTensor, up: FileTensor, known: Mapping[str, Target]) -> Target | None:
    """The target of a module with such tensors. Which parameter of experts it is, their shapes say."""
    experts = re.fullmatch(rf"(model\.layers\.\d+\.)({_NESTED}|{_EXPERTS})", module)
    names = [module]
    if experts is not None:
        names = [f"{experts[1]}{_EXPERTS}.{name}" for name in ("gate_up_proj", "down_proj")]
    for target in (known[name] for name in names if name in known):
        *lead, rows, inputs = target.shape
        ranks = down.shape[0]
        if (down.shape, up.shape) == ((ranks, inputs), (rows, ranks)) and ranks % math.prod(lead) == 0:
            return target
    return None


def _config(cfg: ModelConfig, deltas: Mapping[Target, Delta]) -> dict[str, Json]:
    """The content of adapter_config.json."""
    names = {target: _PARAMETERS.get(target.module, target.module) for target in deltas}
    everywhere = collections.Counter(target.name for target in targets_of(cfg))
    by_name: dict[str, list[Target]] = collections.defaultdict(list)
    for target in deltas:
        by_name[target.name].append(target)
    written: dict[str, tuple[bool, int, float]] = {}  # name -> whether it is a parameter, rank, alpha
    for name, targets in by_name.items():
        values = {(deltas[target].rank, deltas[target].alpha) for target in targets}
        is_short = len(values) == 1 and len(targets) == everywhere[name]
        for target in targets:
            full = target.full_module.removesuffix(target.module) + names[target]
            is_parameter = names[target] != target.module or target.name.startswith("experts.")
            delta = deltas[target]
            written[names[target] if is_short else full] = (is_parameter, delta.rank, delta.alpha)
    ranks, alphas = (collections.Counter(value[i] for value in written.values()).most_common(1)[0][0] for i in (1, 2))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": ranks,
        "lora_alpha": alphas,
        "rank_pattern": {name: rank for name, (_, rank, _) in written.items() if rank != ranks},
        "alpha_pattern": {name: alpha for name, (_, _, alpha) in written.items() if alpha != alphas},
        "target_modules": [name for name, (is_parameter, _, _) in written.items() if not is_parameter],
        "target_parameters": [name for name, (is_parameter, _, _) in written.items() if is_parameter] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
