"""Tensors in safetensors files: what is in them, reading and writing one at a time.

A file is: 8 bytes with the length of the header | JSON header | data. It is read and written here, because the NumPy
interface of the safetensors package does not support 8-bit floats; the package checks the header and the length of the
file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dsv4jax.checks import Named
from dsv4jax.config import Json

DTYPES: Named = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """Where a tensor is."""

    file: Path
    dtype: str  # as in the header
    shape: tuple[int, ...]
    begin: int  # byte in the file
    nbytes: int

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """Read the tensor, or ``count`` rows of its first axis.

        Raises:
          ValueError: its dtype is none of ``DTYPES``, or the file ends before it does.
        """
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise ValueError(f"{self.file} holds {self.dtype}; known are {list(DTYPES)}")
        shape, begin, nbytes = self.shape, self.begin, self.nbytes
        if count is not None:
            row = nbytes // shape[0]
            shape, begin, nbytes = (count, *shape[1:]), begin + first * row, count * row
        data = np.fromfile(self.file, np.uint8, nbytes, offset=begin)
        if data.size != nbytes:
            raise ValueError(f"{self.file} ends before byte {begin + nbytes}")
        return data.view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """A tensor to be written, which is not in memory before its turn comes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_NAMES = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}


def write_file(file: Path, tensors: Mapping[str, NewTensor]) -> None:
    """Write a file of these tensors, those with the widest numbers first, so that each begins at a multiple of them.

    Raises:
      ValueError: a tensor's dtype is none of ``DTYPES``.
    """
    header: Named = {"__metadata__": {"format": "pt"}}
    end, ordered = 0, sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}; known are {list(DTYPES)}")
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            data = np.ascontiguousarray(tensor.make())
            assert (data.dtype, data.shape) == (tensor.dtype, tensor.shape), name
            stream.write(data.reshape(-1).view(np.uint8).data)


def read_header(file: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file by their names.

    Raises:
      ValueError: the file cannot be read, or is shorter than its header says.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as stream:
            data = 8 + int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(data - 8))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            tensors[name] = FileTensor(
                file=file, dtype=entry["dtype"], shape=shape, begin=data + begin, nbytes=end - begin
            )
    return tensors


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor, as ``model.safetensors.index.json`` has it; None if there is no index.

    Raises:
      ValueError: the index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    message = f"cannot read {index}: expected JSON with a 'weight_map' of tensor names"
    try:
        found = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(message) from error
    if not all(isinstance(file, str) for file in found.values()):
        raise ValueError(message)
    return found


def file_names(folder: Path, index: dict[str, str] | None) -> list[str]:
    """Return the names of a checkpoint's files: those in its index, or without one all that the folder holds.

    Raises:
      FileNotFoundError: there are none.
    """
    names = {file.name for file in folder.glob("*.safetensors")} if index is None else set(index.values())
    if not names:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    return sorted(names)


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index if there is one, otherwise from the headers of all files.

    Raises:
      ValueError: the index or a file cannot be read.
      FileNotFoundError: the folder holds no safetensors file.
    """
    index = read_index(folder)
    if index is not None:
        return index
    return {name: file for file in file_names(folder, index) for name in read_header(folder / file)}


def block_size(config: Mapping[str, Json]) -> tuple[int, int] | None:
    """Return rows and columns per scale as a parsed config.json has them; None if it does not say.

    Raises ValueError if what it says is no block.
    """
    try:
        found = config["quantization_config"]["weight_block_size"]
    except (KeyError, TypeError):
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(n, int) and n > 0 for n in found):
        raise ValueError(f"weight_block_size must be two positive integers, got {found!r}")
    return found[0], found[1]
