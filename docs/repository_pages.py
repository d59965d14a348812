"""A mkdocs hook: files of the repository beside ``docs/`` as pages of the site, and links between them.

README is the home page. Notebooks and examples are pages too, notebooks with their stored outputs. Links are written as
they work in the repository, so that its files can be read without a site; here they are turned to the pages.
"""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
# File of the repository -> page of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "citation.md",
    "benchmarks/upstream_setmaxnreg.md": "upstream_setmaxnreg.md",
    **{f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in sorted(ROOT.glob("notebooks/*.ipynb"))},
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted(ROOT.glob("examples/*.py"))},
}
SOURCES = {page: source for source, page in PAGES.items()}
FOLDERS = {"notebooks": "notebooks/01_quickstart.ipynb"}  # a link to one leads to its first page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        if source.endswith((".py", ".cff")):
            text = f"# `{source}`\n\n{fenced(text, 'python' if source.endswith('.py') else 'yaml')}"
        elif source.endswith(".ipynb"):
            text, pictures = notebook(text, PurePosixPath(source).stem)
            for name, content in pictures.items():
                files.append(File.generated(config, f"notebooks/{name}", content=content))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    folder = PurePosixPath(SOURCES.get(here, f"docs/{here}")).parent

    def turned(match: re.Match[str]) -> str:
        target = os.path.normpath(folder / match[1])
        target = FOLDERS.get(target, target)
        to = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if to is None or not (ROOT / target).exists():
            return match[1]
        return os.path.relpath(to, PurePosixPath(here).parent)

    return LINK.sub(turned, markdown)


def fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"


def notebook(text: str, stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook with its stored outputs as Markdown, and its pictures by the names of their files."""
    parts, pictures = [], {}
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced(source, "python"))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above draws]({name})")
            else:
                parts.append(fenced("".join(output.get("text") or data["text/plain"]), "text"))
    return "\n\n".join(parts), pictures
