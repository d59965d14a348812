"""How many files one opens to read a kernel: python -m tests.audits.test_files_opened

A kernel's files are its module and what that imports of ``pallas_kernels``, directly or through others, without the
language and what nobody opens to read it: tables of measured numbers, and names of types.
"""

import pytest

from tests.audits.test_imports import FILES, imports

ASIDE = "pallas_kernels.language", "pallas_kernels.tuned", "pallas_kernels.trees"
# Modules with a kernel's body. None of them may open more files than this.
LIMIT = 10
KERNELS = (
    "attention.sm90",
    "attention.sm90_few",
    "attention.sm90_spread",
    "attention.sm100",
    "attention.wide",
    "scores.sm90",
    "scores.sm100",
    "selection.call",
    "router.call",
    "streams.mixer",
    "update.call",
    "update.token_step",
    "update.pieces",
    "token_parts",
    "gather",
    "products.few.sm90",
    "products.few.sm100",
    "products.many.fp8",
    "products.many.bf16",
    "products.many.wide",
    "products.epilogues.attention",
    "products.epilogues.indexer",
    "products.epilogues.both",
    "products.epilogues.store",
    "products.epilogues.gated",
    "products.experts.sm90",
    "products.experts.fp8",
    "products.experts.rows",
    "activations",
    "allocation",
)


def files_opened(kernel: str) -> list[str]:
    """The modules that a reader of a kernel opens, that of the kernel first."""
    found, waiting = [], [f"pallas_kernels.{kernel}"]
    while waiting:
        module = waiting.pop(0)
        if module in found or module.startswith(ASIDE) or module == "pallas_kernels":
            continue
        found.append(module)
        waiting += sorted(imports()[module])
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_read_in_few_files(kernel):
    opened = files_opened(kernel)
    assert len(opened) <= LIMIT, f"{kernel} opens {len(opened)} files: {', '.join(opened)}"


def main() -> None:
    for kernel in KERNELS:
        opened = files_opened(kernel)
        lines = sum(len(FILES[module].read_text().splitlines()) for module in opened)
        print(f"{kernel:20} {len(opened):2} files, {lines:5} lines: {', '.join(opened)}".replace("pallas_kernels.", ""))


if __name__ == "__main__":
    main()
