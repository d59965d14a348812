"""What a checkpoint's files hold, by their headers, compared with what its configuration says they must.

Everything that is wrong is named in one error, before any weight is read.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

from dsv4jax.model.checkpoint.tensors import FP4_BLOCK, Place, TensorSpec, model_tensors, naming_of, place_of
from dsv4jax.model.config import ModelConfig
from dsv4jax.weights.files import FileTensor, file_names, read_header, read_index
from dsv4jax.weights.load import scale_names
from dsv4jax.weights.stored import find_block, to_e8m0

SHOWN = 5  # names of each kind in an error

type Faults = dict[str, list[str]]  # names of tensors, or sentences about them, by the kind of fault


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The tensors of a checkpoint that were found to be what they must be."""

    cfg: ModelConfig  # with the kind of drafts that there are tensors of
    specs: dict[str, TensorSpec]  # by DeepSeek's names
    places: dict[str, Place]
    files: dict[str, FileTensor]
    has_drafts: bool

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.files.values())

    def scale(self, name: str) -> Place | None:
        """Where the block scales of a tensor are, by DeepSeek's name of the tensor."""
        place = self.places[name]
        found = next((scale for scale in scale_names(place.name) if scale in self.files), None)
        return None if found is None else dataclasses.replace(place, name=found)


def open_tensors(folder: Path, cfg: ModelConfig, weights: str, block: tuple[int, int] | None) -> Tensors:
    """Compare the headers of a checkpoint's files with what they must hold.

    Args:
      folder: of the checkpoint.
      cfg: the sizes that its config.json says.
      weights: how they will be held, one of ``WEIGHTS``: "stored" cannot hold all scales.
      block: rows and columns per scale of FP8 weights, as config.json says; None if it does not.

    Raises:
      ValueError: with everything that is wrong.
      FileNotFoundError: there is no file.
    """
    files = _read_headers(folder)
    naming = naming_of(set(files))
    if naming is None:
        raise ValueError(f"{folder} holds no embedding under a known name; its tensors begin {sorted(files)[:SHOWN]}")
    is_dspark = "mtp.0.main_proj.weight" in files
    if is_dspark and cfg.dspark is None:
        raise ValueError(f"{folder} holds a DSpark block, and its configuration lacks dspark_block_size")
    has_drafts = is_dspark or "mtp.0.enorm.weight" in files
    if not has_drafts:  # a block for drafts of a kind that is not known
        files = {name: tensor for name, tensor in files.items() if not name.startswith("mtp.")}
    if not is_dspark:
        cfg = dataclasses.replace(cfg, dspark=None)
    specs = model_tensors(cfg, has_drafts)
    places = {name: place_of(name, naming, cfg) for name in specs}
    tensors = Tensors(cfg=cfg, specs=specs, places=places, files=files, has_drafts=has_drafts)
    if wrong := _faults(tensors, weights, block):
        raise ValueError(_listed(folder, wrong))
    return tensors


def _read_headers(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of all files of a folder, by their names there. ValueError, with all files at fault."""
    index = read_index(folder)
    wrong: Faults = collections.defaultdict(list)
    files: dict[str, FileTensor] = {}
    for name in file_names(folder, index):
        try:
            header = read_header(folder / name)
        except ValueError as error:
            wrong["files that cannot be read"].append(str(error))
            continue
        if twice := sorted(set(header) & set(files)):
            wrong["in two files"].extend(twice)
        files |= header
    if index is not None and (lost := sorted(set(index) - set(files))):
        wrong["missing"].extend(lost)
    if wrong:
        raise ValueError(_listed(folder, wrong))
    return files


def _faults(tensors: Tensors, weights: str, block: tuple[int, int] | None) -> Faults:
    """Return what is wrong with the tensors of a checkpoint."""
    wrong: Faults = collections.defaultdict(list)
    files, used = tensors.files, set[str]()
    for name, spec in tensors.specs.items():
        place = tensors.places[name]
        if place.name not in files:
            wrong["missing"].append(place.name)
            continue
        scale = tensors.scale(name)
        used |= {place.name} | ({scale.name} if scale else set())
        of_blocks = files[scale.name] if scale else None
        if problem := _misfit(spec, place, files[place.name], of_blocks, tensors.cfg, block):
            wrong["misshapen"].append(f"{place.name} is {problem}")
        elif weights == "stored" and spec.form == "fp8" and of_blocks is not None:
            try:
                to_e8m0(of_blocks.read())
            except ValueError as error:
                wrong["for weights='wide', 'bf16' or 'f32' alone"].append(f"{place.name}, whose {error}")
    if unknown := sorted(set(files) - used):
        wrong["unknown"] = unknown
    return wrong


def _listed(folder: Path, wrong: Faults) -> str:
    lines = [f"{folder} is no checkpoint of this configuration:"]
    for kind, found in wrong.items():
        distinct = list(dict.fromkeys(found))
        more = f", and {len(distinct) - SHOWN} more" if len(distinct) > SHOWN else ""
        lines.append(f"  {kind} ({len(distinct)}): {', '.join(distinct[:SHOWN])}{more}")
    return "\n".join(lines)


_FLOATS, _INTEGERS, _FP4_CODES = ("BF16", "F32"), ("I64", "I32"), ("I8", "U8")


def _misfit(
    spec: TensorSpec,
    place: Place,
    tensor: FileTensor,
    scale: FileTensor | None,
    cfg: ModelConfig,
    block: tuple[int, int] | None,
) -> str | None:
    """What is wrong with a tensor; None if nothing is."""
    is_weight, found = spec.form in ("fp8", "fp4"), f"{tensor.dtype} {list(tensor.shape)}"
    shape, rows = spec.shape, spec.shape[:-1]
    if place.expert is not None:  # one tensor for all experts
        rows = (cfg.num_experts, 2 * cfg.expert_width if "gate_up" in place.name else cfg.hidden_size)
        shape = (*rows, spec.shape[-1])
    packed = (*rows, shape[-1] // 2)
    fits = {"bf16": _FLOATS, "f32": _FLOATS, "int64": _INTEGERS}.get(spec.form, (*_FLOATS, "F8_E4M3"))
    is_fp4 = spec.form == "fp4" and tensor.dtype in _FP4_CODES and tensor.shape == packed
    if not is_fp4 and (tensor.dtype not in fits or tensor.shape != shape):
        or_packed = f", or I8 {list(packed)}" if spec.form == "fp4" else ""
        return f"{found}, expected {' or '.join(fits)} {list(shape)}{or_packed}"
    if not is_fp4 and tensor.dtype != "F8_E4M3":
        return f"{found}, and has block scales" if is_weight and scale else None
    if scale is None:
        return f"{found}, and has no block scales"
    if scale.dtype not in ("F8_E8M0", "F32"):
        return f"{found}, with scales that are {scale.dtype}, expected F8_E8M0 or F32"
    try:
        find_block(shape, scale.shape, FP4_BLOCK if is_fp4 else block)
    except ValueError as error:
        return f"{found}, and {error}"
    return None
