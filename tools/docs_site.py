"""Hooks of mkdocs: add the README, the changelog and the pages of the reference, and rewrite links.

A link to a file that the site does not have (a module, a folder of tests) is shown as its text.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from settings_table import SETTINGS, table  # mkdocs does not find the modules next to a hook

ROOT = Path(__file__).resolve().parents[1]
TOP = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that are not in docs/, and their source files."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for page, source in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page in sorted(set(_reference(config["nav"]))):
        package = posixpath.basename(page).removesuffix(".md")
        content = table(package) if package in SETTINGS else f"::: {package}"
        files.append(File.generated(config, page, content=f"# {package}\n\n{content}\n"))
    return files


def _reference(nav: Any) -> list[str]:
    """Return the pages of the reference that the navigation names."""
    if isinstance(nav, str):
        return [nav] if nav.startswith("reference/") else []
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _reference(part)]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links to pages of the site, and replace other links by their text."""
    source = page.file.src_uri
    folder = "" if source in TOP else posixpath.join("docs", posixpath.dirname(source))

    def replaced(found: re.Match[str]) -> str:
        bang, text, link = found.groups()
        path, _, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return found[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        there = {name: each for each, name in TOP.items()}.get(target, target.removeprefix("docs/"))
        if (target in TOP.values() or target.startswith("docs/")) and files.get_file_from_path(there) is not None:
            relative = posixpath.relpath(there, posixpath.dirname(source) or ".")
            return f"{bang}[{text}]({relative}{'#' + anchor if anchor else ''})"
        return text

    return LINK.sub(replaced, markdown)
