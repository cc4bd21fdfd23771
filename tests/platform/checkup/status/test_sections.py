"""Sections of a status that other packages add."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from coranto.checkup.results import Condition
from coranto.checkup.status.sections import GROUP, load_sections

PROJECT = Path(__file__).parents[4] / "pyproject.toml"


def test_built_in_sections_can_be_loaded() -> None:
    named = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    sections, failures = load_sections([EntryPoint(name, value, GROUP) for name, value in named.items()])
    assert failures == []
    assert [section.__name__ for section in sections] == ["consumers"]


def test_a_section_that_cannot_be_loaded_is_reported() -> None:
    broken = [EntryPoint("one", "no_such_module:x", GROUP), EntryPoint("two", "json:no_such_name", GROUP)]
    sections, failures = load_sections(broken)
    assert sections == []
    assert [(each.subject, each.condition) for each in failures] == [
        ("one", Condition.NOT_EXAMINED),
        ("two", Condition.NOT_EXAMINED),
    ]
    assert "no_such_module" in failures[0].found
