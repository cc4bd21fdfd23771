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
EXTRAS = ("broker", "embedded", "oidc", "consumers", "spark", "lake", "dagster")
"""The extras whose packages this environment has. Airflow has an environment of its own."""

COMPATIBLE = frozenset(
    {
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-0", "PSF-2.0", "Zlib"),
        *("LGPL-3.0-only", "MPL-2.0"),  # Used as libraries, unchanged.
    }
)
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""SPDX identifiers of the names that older packages state."""


def license_of(package: str) -> str:
    """Return an installed package's license as an SPDX expression, or as the package states it."""
    stated = metadata.metadata(package)
    if expression := stated.get("License-Expression"):
        return expression
    names = [text.split(" :: ")[-1] for text in stated.get_all("Classifier") or () if text.startswith("License ::")]
    return " OR ".join(SPDX.get(name, name) for name in names or [(stated.get("License") or "none stated").strip()])


def is_compatible(expression: str) -> bool:
    """Return True if every license of an SPDX expression is compatible with the Apache License 2.0."""
    return COMPATIBLE.issuperset(re.findall(r"[^()\s]+", re.sub(r"\b(AND|OR)\b", " ", expression)))


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
    """Return the direct requirements of each extra with their licenses, in Markdown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"(always)": project["dependencies"], **{name: project["optional-dependencies"][name] for name in EXTRAS}}
    lines = ["| extra | package | license |", "|---|---|---|"]
    for extra, requirements in groups.items():
        names = sorted(normalized(Requirement(text).name) for text in requirements)
        lines += [f"| {extra} | {name} | {license_of(name)} |" for name in names if name != "coranto"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    incompatible = {
        name: found
        for name in sorted(required("coranto", frozenset(EXTRAS)))
        if not is_compatible(found := license_of(name))
    }
    for name, found in incompatible.items():
        print(f"{name}: the license {found!r} is not known to be compatible with the Apache License 2.0")
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
