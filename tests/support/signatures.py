"""The public face as text: every name of ``dsv4jax`` and its groups, with arguments, defaults, fields and methods.

python -m tests.support.signatures > tests/docs/signatures.txt
"""

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from typing import Any

import dsv4jax as d4

CONFIG = ("LayerSpec", "layer_schedule")  # what of dsv4jax.config is not at the top
GROUPS = {
    "dsv4jax": (d4, d4.__all__),
    "dsv4jax.config": (d4.config, CONFIG),
    **{f"dsv4jax.{name}": (group := getattr(d4, name), group.__all__) for name in d4._GROUPS if name != "config"},
}


class _Default:
    """A default as it is shown: a dtype by its name."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return self.value.__name__ if isinstance(self.value, type) else repr(self.value)


def arguments(function: Any) -> str:
    """The arguments of a function and their defaults. Annotations are left to the type checker."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default if parameter.default is parameter.empty else _Default(parameter.default)
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(shown))


def described(name: str, value: Any) -> Iterator[str]:
    """The lines of one public name: a function's is its signature, a class has one for each public member too."""
    if not isinstance(value, type):
        yield name + arguments(value)
        return
    if issubclass(value, enum.Enum):
        yield f"{name}: {', '.join(f'{member.name}={member.value!r}' for member in value)}"
    else:
        yield name + (arguments(value) if dataclasses.is_dataclass(value) or "__init__" in vars(value) else "")
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    for member, found in sorted(vars(value).items()):
        if member.startswith("_") or member in fields or isinstance(found, value):
            continue
        plain = getattr(found, "__func__", found)  # of a class method or a static one
        yield f"{name}.{member}" + (arguments(plain) if callable(plain) else "")


def signatures() -> str:
    """All public names, one a line and in order."""
    return "".join(
        f"{line}\n"
        for group, (module, names) in GROUPS.items()
        for name in sorted(names)
        for line in described(f"{group}.{name}", getattr(module, name))
    )


if __name__ == "__main__":
    print(signatures(), end="")
