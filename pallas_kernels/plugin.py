"""The CUDA plugin of JAX, which compiles the kernels, and a warning where it makes slow ones.

Versions from 0.12 on compile kernels as relocatable code, through nvJitLink. There ``setmaxnreg`` is ignored, so that
the roles of a block keep the registers that they are launched with: the ones that multiply spill, and the compiler
serializes their products. On Hopper that takes the speed of ``attention.sm90`` and of ``products.many``. On Blackwell
nothing spills.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import warnings

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")  # in the order in which JAX looks for them
RELOCATABLE_SINCE = (0, 12)

_warned: set[str] = set()  # plugins that were named in a warning: one for each in a process


class SlowKernelsWarning(UserWarning):
    """The installed CUDA plugin compiles a kernel to slow code, and the message says what to install instead.

    Given once in a process. Results are right all the same. To be rid of it without another plugin:

        warnings.filterwarnings("ignore", category=pallas_kernels.SlowKernelsWarning)
    """


@functools.cache  # it reads files, and every reciprocal of a kernel asks
def _installed() -> tuple[str, str] | None:
    """Return the name and version of the CUDA plugin in use; None if there is none."""
    for name in PLUGINS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def compiles_relocatable_code() -> bool:
    """Whether kernels are compiled such that ``setmaxnreg`` has no effect. False where no CUDA plugin is installed."""
    installed = _installed()
    if installed is None:
        return False
    release = tuple(int(number) for number in re.findall(r"\d+", installed[1])[:2])
    return release >= RELOCATABLE_SINCE


def warn_if_slow(kernel: str) -> None:
    """SlowKernelsWarning where ``kernel``, whose roles change their registers on Hopper, is about to be compiled so.

    Once in a process: whichever kernel comes first is named.
    """
    installed = _installed()
    if installed is None or not compiles_relocatable_code() or installed[0] in _warned:
        return
    name, version = installed
    _warned.add(name)
    bound = ".".join(str(number) for number in RELOCATABLE_SINCE)
    warnings.warn(
        f"{name} {version} compiles the kernel {kernel} to slower code than {name} below {bound} does: it ignores the "
        "register counts that the kernel asks for, so that registers are spilled and matrix products serialized. jax "
        f'itself can stay as it is: pip install "jaxlib>=0.11.2,<{bound}" "{name}[with-cuda]>=0.11.2,<{bound}"',
        SlowKernelsWarning,
        stacklevel=2,
    )
