"""How pytrees print: the shape and dtype of each array, never its values, and a page at most.

    AttentionParams(
      q_a_kv=f32[160,64], q_norm=f32[24], kv_norm=f32[136], q_b=f32[544,24], o_a=f32[32,272],
      ...
    )

Works for tracers, shapes, specs and donated arrays too. Equal members of a sequence are shown once, under their
numbers. What would not fit on a page is shortened from the inside: ``Experts(4 arrays)``.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.core import Tracer

from dsv4jax.checks import Tree

PAGE, WIDTH = 60, 116  # lines and columns
_DEEPEST = 12


def print_compactly(*classes: Tree) -> None:
    """Give dataclasses ``compact`` as their ``repr``. One whose decorator says ``repr=False`` keeps its own."""
    for cls in classes:
        if cls.__dataclass_params__.repr:
            cls.__repr__ = compact


def compact(tree: object, **shown: str) -> str:
    """Return a pytree as text of at most ``PAGE`` lines, if its outermost level has no more.

    ``shown`` are fields of a dataclass to show first, and as the text that is given.
    """
    text = ""
    for depth in range(_DEEPEST, 0, -1):
        text = _format(tree, depth, WIDTH, shown)
        if text.count("\n") < PAGE:
            break
    return text


def values_of(**arrays: object) -> dict[str, str]:
    """Return the values of small arrays as text, for ``compact`` to show; nothing of those that have none at hand."""
    known = {
        name: array
        for name, array in arrays.items()
        if isinstance(array, jax.Array) and not isinstance(array, Tracer) and not array.is_deleted()
    }
    return {name: np.array2string(np.asarray(array), threshold=16) for name, array in known.items()}


def _format(value: object, depth: int, width: int, shown: dict[str, str] | None = None) -> str:
    """Format a value, with ``depth`` levels of fields and members, in lines of ``width`` columns where possible."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        inside = jax.tree.leaves(value)
        if len(inside) == 1 and inside[0] is value:  # no pytree, such as a plan or a configuration
            return text if len(text := repr(value)) <= WIDTH else f"{name}(...)"
        if not depth:
            return f"{name}({len(inside)} arrays)"
        texts = dict(shown or {})
        for key in (field.name for field in dataclasses.fields(value)):
            if key not in texts:
                texts[key] = _format(getattr(value, key), depth - 1, width - 4 - len(key))
        return _joined(f"{name}(", [f"{key}={text}" for key, text in texts.items()], ")", width)
    if isinstance(value, tuple | list | dict) and any(map(_is_array, jax.tree.leaves(value))):
        if not depth:
            return f"{type(value).__name__}({len(jax.tree.leaves(value))} arrays)"
        keys = value.items() if isinstance(value, dict) else enumerate(value)
        members: dict[str, list[str]] = {}
        for key, member in keys:
            members.setdefault(_format(member, depth - 1, width - 8), []).append(repr(key))
        return _joined("{", [f"{', '.join(names)}: {text}" for text, names in members.items()], "}", width)
    if _is_array(value):
        return _spec(value)
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _joined(head: str, items: list[str], tail: str, width: int) -> str:
    """Put items on one line if they fit, or else on lines of their own, two columns in."""
    line = f"{head}{', '.join(items)}{tail}"
    if len(line) <= width and "\n" not in line:
        return line
    lines: list[str] = []
    for item in items:
        if lines and "\n" not in lines[-1] + item and len(lines[-1]) + len(item) + 4 <= width:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")
    return "\n".join([head, *("  " + line.replace("\n", "\n  ") for line in lines), tail])


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _spec(array: Tree) -> str:
    """Return f32[2,3] for an array of float32, bf16 for bfloat16, u8 for uint8, i32 for int32."""
    name = array.dtype.name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            name = short + name.removeprefix(long)
            break
    return f"{name}[{','.join(map(str, array.shape))}]"
