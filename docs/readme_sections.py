"""Puts sections of README.md into pages: ``{{ README: heading }}`` on a line becomes what stands under that heading.

So a figure stands in one place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def section(heading: str) -> str:
    """What stands under a heading of README.md, with links as a page of docs/ needs them."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", README.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no section {heading!r}")
    return found.group(1).strip().replace("](docs/", "](")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return re.sub(r"^\{\{ README: (.*) \}\}$", lambda match: section(match.group(1)), markdown, flags=re.MULTILINE)
