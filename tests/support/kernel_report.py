"""Report what PTX, ptxas and XLA say about one kernel that is compiled without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tests.support.compile_for_gpu import compile_for
from tests.support.in_place import copied_bytes, memory_of

# Without MOSAIC_GPU_DUMP_TO they go to standard output. With it, nvdisasm would be required too.
DUMPS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
SM_REGISTERS, SM_THREADS, SM_BLOCKS, SM_SHARED = 65536, 2048, 32, 228 << 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A call that launches one kernel. Its first argument is the state, which it updates unless ``reads_only``."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rows: Any  # the pool's NoPE channels [layers, num_blocks, entries_per_block, dim], if the kernel addresses them
    reads_only: bool = False
    has_scratch: bool = False  # besides the cache, which is larger

    def compiled(self, target: str, *, donate: bool = True) -> Any:
        """Compile the call for a target, with its state donated unless that is not to be."""
        donated = {} if self.reads_only or not donate else dict(donate_argnums=0)
        return compile_for(target, self.function, *self.args, **donated)


@contextlib.contextmanager
def standard_output() -> Iterator[list[str]]:
    """Capture what the process writes to standard output, including C++ code."""
    written: list[str] = []

    def flush() -> None:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)

    flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield written
        finally:
            flush()
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        written.append(file.read())


def _numbers(pattern: str, text: str) -> list[int]:
    """Return the groups of a pattern's only match; an empty list if it does not match exactly once."""
    found = re.findall(pattern, text)
    return [int(group) for group in (found[0] if isinstance(found[0], tuple) else found)] if len(found) == 1 else []


def strides_in_32_bits(ptx: str, rows: Any) -> list[int]:
    """Return the pool's strides in bytes, of layer and block, that the kernel does not multiply in 64 bits."""
    size = rows.size * rows.dtype.itemsize
    strides = [size // rows.shape[0], size // (rows.shape[0] * rows.shape[1])]
    wide, narrow = (
        {int(number) for number in re.findall(rf"{op} \s*[^;]*?, (\d+)[,;]", ptx)}
        for op in (r"(?:mul\.wide\.[su]32|m(?:ul|ad)\.lo\.[su]64)", r"m(?:ul|ad)\.lo\.[su]32")
    )
    return [stride for stride in strides if stride not in wide or stride in narrow]


def joined_zero_tests(ptx: str) -> int:
    """Count the comparisons with zero of (a ? m : 0) | (b ? n : 0).

    ptxas 13.0 can turn "both are zero" into "neither is zero" where such a comparison is one of several conditions. It
    is among those that a JAX plugin may use, and later ones do not do so.
    """
    chosen = set(re.findall(r"selp\.b32\s+(%r\d+), \d+, 0,", ptx))
    joined = {out for out, a, b in re.findall(r"or\.b32\s+(%r\d+), (%r\d+), (%r\d+);", ptx) if {a, b} <= chosen}
    return sum(value in joined for value in re.findall(r"setp\.(?:eq|ne)\.[sub]32\s+%p\d+, (%r\d+), 0;", ptx))


def blocks_per_sm(registers: int, threads: int, shared: int) -> int:
    """Return how many blocks of a kernel fit on an SM.

    Registers are allocated per warp in units of 256; 1 KiB is reserved.
    """
    by_registers = SM_REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(by_registers, SM_THREADS // threads, SM_BLOCKS, SM_SHARED // (shared + 1024))


def dump_to_standard_output() -> None:
    """Make this process write the PTX and ptxas's output of every kernel that it compiles from now on."""
    os.environ.pop("MOSAIC_GPU_DUMP_TO", None)
    os.environ.update(dict.fromkeys(DUMPS, "1"))


def report(target: str, kernel: Kernel, *, donate: bool = True) -> dict[str, Any]:
    with standard_output() as written:
        compiled = kernel.compiled(target, donate=donate)
    dump, hlo, memory = written[0], compiled.as_text() or "", memory_of(compiled)
    leaves = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kernel.args[0])]
    registers = _numbers(r"Used (\d+) registers", dump)
    threads = _numbers(r"\.maxntid (\d+), 1, 1", dump)
    shared = _numbers(r"smem_scratch_bytes=(\d+)", dump)
    return {
        "targets": sorted(set(re.findall(r"^\.target (\w+)", dump, re.MULTILINE))),
        "architectures": sorted(set(re.findall(r"Compiling entry function '\w+' for '(\w+)'", dump))),
        "entry points": len(re.findall(r"^\.visible \.entry", dump, re.MULTILINE)),
        "custom calls": re.findall(r'custom_call_target="([^"]+)"', hlo),
        "stack and spills": _numbers(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", dump
        ),
        # Warnings of ptxas, in its own output or in nvJitLink's. There are several reasons to serialize products, each
        # with a number of its own: C7509 is a call in the kernel.
        "asks for registers": "setmaxnreg." in dump,
        "setmaxnreg ignored": "'setmaxnreg' ignored" in dump,
        "products serialized": "wgmma.mma_async instructions are serialized" in dump,
        "registers": registers,
        "threads": threads,
        "shared": shared,
        "blocks per SM": blocks_per_sm(*registers, *threads, *shared) if registers and threads and shared else 0,
        "strides in 32 bits": [] if kernel.rows is None else strides_in_32_bits(dump, kernel.rows),
        "joined zero tests": joined_zero_tests(dump),
        "elements": 0 if kernel.rows is None else kernel.rows.size,
        "donated": 0 if kernel.reads_only else sum(leaves),
        "aliased": memory.alias_size_in_bytes,
        "smallest leaf": (max if kernel.has_scratch else min)(leaves),
        "temporaries": memory.temp_size_in_bytes,
        "copied": copied_bytes(hlo),
    }
