"""A dataclass field's comment, ``state: StateCache  # what it is``, becomes its description in the API pages."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Docstring, Extension


class FieldComments(Extension):
    """Read by mkdocstrings' Python handler."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        in_class = attr.parent is not None and attr.parent.is_class
        found = re.search(r"  # (?!type:|noqa|pyright:)(.*)$", attr.source) if in_class else None
        if found is not None and attr.docstring is None:
            attr.docstring = Docstring(found.group(1), parent=attr)
