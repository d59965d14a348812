"""What kernels are compiled to, before and after a change: python -m tests.support.kernel_code h200 FOLDER

Writes the PTX of each kernel into a folder, and next to it ptxas' registers and spills, the bytes of its machine code
and a hash of them. With ``--only`` and a pattern, only of the kernels whose names match. With ``--beside`` and a folder
that was written before, it says of each kernel what became of it, and ends with 1 if any takes other registers, spills
or bytes than before. One target per process. Needs the extra ``cross``, whose ptxas it uses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from tests.support.compile_for_gpu import TARGETS, prepare_environment
from tests.support.compiled_kernels import HOPPER_ONLY, kernels
from tests.support.kernel_report import dump_to_standard_output, standard_output

_FACTS = "code.json"


def ptx_of(dump: str) -> str:
    """Return the PTX in what compiling one kernel wrote."""
    (found,) = re.findall(r"^\.version .*^\}$", dump, re.MULTILINE | re.DOTALL)
    assert found.count(".visible .entry") == 1, "one kernel is meant"
    return found


def assembled(ptx: str) -> dict[str, Any]:
    """Return what ptxas makes of a kernel: registers, bytes of spills, bytes of machine code, and a hash of that."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = ["ptxas", "-v", "-O3", f"-arch={target}", "-o", str(cubin), str(source)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        code = machine_code(cubin.read_bytes())
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return {
        "registers": int(registers),
        "spills": sum(int(number) for pair in spills for number in pair),
        "bytes": len(code),
        "code": hashlib.sha256(code).hexdigest()[:16],
    }


def machine_code(cubin: bytes) -> bytes:
    """Return the sections of a 64-bit ELF file whose names begin with .text, one after the other."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * n) for n in range(count)]  # name .. offset, size
    names = headers[of_names][4]

    def name(at: int) -> bytes:
        return cubin[names + at : cubin.index(b"\0", names + at)]

    return b"".join(cubin[at : at + length] for word, *_, at, length in headers if name(word).startswith(b".text"))


def compared(before: dict[str, Any], after: dict[str, Any], *, is_same_ptx: bool) -> tuple[bool, str]:
    """Return whether a kernel takes what it took before, and that in words."""
    if is_same_ptx:
        return True, "same PTX"
    if before["code"] == after["code"]:
        return True, "same machine code"
    facts = "registers", "spills", "bytes"
    if all(before[fact] == after[fact] for fact in facts):
        return True, "same registers, spills and size"
    return False, ", ".join(f"{fact} {before[fact]} -> {after[fact]}" for fact in facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression, found in a kernel's name")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="what was written before")
    options = parser.parse_args()
    prepare_environment()
    jax.config.update("jax_platforms", "cpu")  # JAX is already imported and has read the environment variable
    dump_to_standard_output()
    options.folder.mkdir(parents=True, exist_ok=True)
    before = json.loads((options.beside / _FACTS).read_text()) if options.beside else {}
    facts, moved = {}, 0
    for name, kernel in kernels():
        if not re.search(options.only, name) or (options.target != "h200" and name.split()[1] in HOPPER_ONLY):
            continue
        file = re.sub(r"\W+", "_", name).strip("_") + ".ptx"
        with standard_output() as written:
            kernel.compiled(options.target)
        ptx = ptx_of(written[0])
        (options.folder / file).write_text(ptx)
        facts[name] = assembled(ptx)
        if name in before:
            is_same_ptx = ptx == (options.beside / file).read_text()
            is_same, words = compared(before[name], facts[name], is_same_ptx=is_same_ptx)
            moved += not is_same
            print(f"{name}: {words}", flush=True)
    (options.folder / _FACTS).write_text(json.dumps(facts, indent=1))
    print(f"{len(facts)} kernels" + (f", {moved} of them not what they were" if options.beside else ""))
    sys.exit(moved > 0)


if __name__ == "__main__":
    main()
