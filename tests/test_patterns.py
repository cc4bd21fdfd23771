"""Regular expressions mean the same on every version of Python that Coranto supports."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.possessive import version_dependent_parts

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "coranto",
    "coranto_broker",
    "coranto_consumers",
    "pyspark_coranto",
    "pyspark_coranto_name",
    "coranto_flights",
    "dagster_coranto",
)
NOT_INSTALLED = {"confluent_kafka", "dlt"}
"""Modules of extras that may be missing here. Importers of such modules are only checked for literal patterns."""
SOURCES = ("platform", "broker", "consumers", "orchestration")

# Python 3.11.2 matches these texts differently from 3.13, or from the pattern's meaning.
VERSION_DEPENDENT = (
    r"(?:ab?c)++",
    r"(?:[ab]{2}(?:[ab]{2}|a=|==))*+",
    r"(?:: (?!<)([^\n]*+))?+",
    r"(?:\s*+<a>)?+",
    r"(?>ab?c)",
    r"(?:(?:[^c]*+a|b),)*+",
)
PORTABLE = (
    r"[ab]*+",
    r"(?:\\.|[^\"\\])*+",
    r"(?:[^`]|``)++",
    r"(?:\.[0-9]*+)?+",
    r"(?:,(?:\"(?:[^\"]++|\"\")*+\"|[^\",]*+))*+",
    r"(?:ab?c)+",
)


def module_patterns() -> Iterator[tuple[str, re.Pattern[str] | re.Pattern[bytes]]]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.endswith("__main__"):
                try:
                    module = importlib.import_module(found.name)
                except ModuleNotFoundError as error:
                    if error.name not in NOT_INSTALLED:
                        raise
                    continue
                for name, value in vars(module).items():
                    if isinstance(value, re.Pattern):
                        yield f"{found.name}.{name}", value


def literal_patterns() -> Iterator[tuple[str, re.Pattern[str] | re.Pattern[bytes]]]:
    for path in (path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "import re" in text else ():
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).startswith("re.")
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str | bytes)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", re.compile(node.args[0].value)


def test_every_pattern_matches_alike_on_all_versions_of_python() -> None:
    patterns = dict([*module_patterns(), *literal_patterns()])
    assert len(patterns) > 60
    found = {name: parts for name, pattern in patterns.items() if (parts := version_dependent_parts(pattern))}
    assert not found, "make the group plain, or start each alternative with the characters that decide it"


@pytest.mark.parametrize("text", VERSION_DEPENDENT)
def test_groups_that_python_versions_match_differently_are_found(text: str) -> None:
    assert version_dependent_parts(re.compile(text))


@pytest.mark.parametrize("text", PORTABLE)
def test_groups_that_python_versions_match_alike_are_allowed(text: str) -> None:
    assert not version_dependent_parts(re.compile(text))
