"""Write the table of licenses in docs/licenses.md, and check the license of every package that Coranto requires."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "licenses.md"
BEGIN, END = "<!-- table: tools/licenses.py -->\n", "<!-- end of table -->\n"
EXTRAS = (
    *("broker", "embedded", "oidc", "consumers", "postgres", "webhook", "spark", "lake", "dagster", "dg", "traces"),
)
"""Extras installed in this environment."""
ELSEWHERE = ("kafka", "dlt", "airflow")
"""Extras with separate environments. `make test-install` runs `licenses.py --of EXTRA` in each."""
NOT_INSTALLED = ("all", "demo", "dev", "airflow-dev")
"""Extras that combine other extras, and extras for developers of this project."""

COMPATIBLE = frozenset(
    {
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-0", "PSF-2.0", "Zlib"),
        "Unlicense",
        *("Artistic-1.0", "LGPL-3.0-only", "MPL-2.0"),  # Used as libraries, unchanged.
    }
)
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Artistic License": "Artistic-1.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "BSD 3-Clause OR Apache-2.0": "BSD-3-Clause OR Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""SPDX expressions for the license names that packages state."""


def license_of(package: str) -> str:
    """Return an installed package's license as an SPDX expression, or as stated if it has no known expression."""
    stated = metadata.metadata(package)
    if expression := stated.get("License-Expression"):
        return SPDX.get(expression, expression)
    names = [text.split(" :: ")[-1] for text in stated.get_all("Classifier") or () if text.startswith("License ::")]
    return " OR ".join(SPDX.get(name, name) for name in names or [(stated.get("License") or "none stated").strip()])


def is_compatible(expression: str) -> bool:
    """Return True if an SPDX expression, or one of its alternatives, is compatible with the Apache License 2.0."""
    while inner := re.search(r"\(([^()]*)\)", expression):
        found = "MIT" if is_compatible(inner[1]) else "incompatible"
        expression = expression[: inner.start()] + found + expression[inner.end() :]
    return any(COMPATIBLE.issuperset(each.split(" AND ")) for each in expression.split(" OR "))


def required(package: str, extras: frozenset[str]) -> set[str]:
    """Return the names of all installed packages that a package with extras requires, directly or not."""
    found: dict[str, frozenset[str]] = {}
    waiting = [(package, extras)]
    while waiting:
        name, wanted = waiting.pop()
        known = found.get(name)
        if known is not None and known >= wanted:
            continue
        found[name] = wanted = wanted | (known or frozenset())
        waiting += [
            (normalized(requirement.name), frozenset(requirement.extras))
            for requirement in map(Requirement, metadata.requires(name) or ())
            if _applies(requirement, wanted)
        ]
    return set(found) - {package}


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def table() -> str:
    """Return the direct requirements of each extra with their licenses, one row for each, in Markdown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"(always)": project["dependencies"], **{name: project["optional-dependencies"][name] for name in EXTRAS}}
    lines = ["| extra | packages |", "|---|---|"]
    for extra, requirements in groups.items():
        names = sorted({normalized(Requirement(text).name) for text in requirements} - {"coranto"})
        lines.append(f"| {extra} | {', '.join(f'{name} ({license_of(name)})' for name in names)} |")
    return "\n".join(lines) + "\n"


def incompatible_packages(extras: Iterable[str]) -> dict[str, str]:
    """Return the licenses of installed requirements of Coranto that are not known to be compatible, by package."""
    names = sorted(required("coranto", frozenset(extras)))
    return {name: found for name in names if not is_compatible(found := license_of(name))}


def unnamed_extras() -> list[str]:
    """Return the extras that the page does not name."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    text = PAGE.read_text()
    named = {*EXTRAS, *NOT_INSTALLED, *(name for name in ELSEWHERE if f"The extra `{name}`" in text)}
    return sorted(extras - named)


def main(arguments: list[str]) -> int:
    extras = arguments[1:] if arguments[:1] == ["--of"] else EXTRAS
    incompatible = incompatible_packages(extras)
    for name, found in incompatible.items():
        print(f"{name}: the license {found!r} is not known to be compatible with the Apache License 2.0")
    if arguments[:1] == ["--of"]:
        return 1 if incompatible else 0
    if unnamed := unnamed_extras():
        print(f"{PAGE.relative_to(ROOT)} does not name the extras {', '.join(unnamed)}: name them in tools/licenses.py")
        return 1
    before, rest = PAGE.read_text().split(BEGIN)
    text = f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"
    if arguments == ["--check"]:
        if text != PAGE.read_text():
            print(f"{PAGE.relative_to(ROOT)} is not current: run `python tools/licenses.py`")
        return 1 if incompatible or text != PAGE.read_text() else 0
    PAGE.write_text(text)
    return 1 if incompatible else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
