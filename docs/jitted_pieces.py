"""Shows a jitted piece, ``append_swa = _piece(update.append_swa, "state")``, as the function that it wraps."""

from __future__ import annotations

from typing import Any

from griffe import Alias, ExprCall, Extension, Module


class JittedPieces(Extension):
    """Read by mkdocstrings' Python handler."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        if "pieces" not in pkg.members:
            return
        pieces = pkg["pieces"]
        for name, member in list(pieces.members.items()):
            value = member.value if not member.is_alias and member.is_attribute else None
            if isinstance(value, ExprCall) and str(value.function) == "_piece":
                module, _, function = str(value.arguments[0]).partition(".")
                target = pieces[module].target[function]
                pieces.set_member(name, Alias(name, target, parent=pieces))
