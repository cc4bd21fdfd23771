"""The reference of specs documents every field and every label of specs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coranto import labels
from coranto.specs import durability, journal_tree
from coranto.streams.model import stream
from coranto_consumers.forks import lifecycle
from coranto_consumers.runtime import shard_set

PAGE = (Path(__file__).parents[3] / "docs" / "specs.md").read_text()
NAMED = set(re.findall(r"`([A-Za-z0-9_./-]+)`", PAGE))

# Labels of messages, requests and registers, which no spec has, and prefixes of names.
NOT_OF_SPECS = {
    labels.PREFIX,
    labels.HELD,
    labels.FORKS,
    labels.JSON_LINES,
    stream.RESTORED_LABEL,
    stream.EXPIRED_LABEL,
}


def labels_of(module: object) -> set[str]:
    values = {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}
    return {value for value in values if re.match(r"((app\.gazette|coranto)\.dev/.*[^-/]|content-type)$", value)}


def test_every_field_of_a_journal_is_documented() -> None:
    assert set(journal_tree._NODE_FIELDS) | set(journal_tree._FRAGMENT_FIELDS) <= NAMED


def test_every_field_of_a_shard_is_documented() -> None:
    assert {"id", "shards", *shard_set._SHARED} <= NAMED


@pytest.mark.parametrize("module", [labels, durability, stream, lifecycle], ids=lambda module: module.__name__)
def test_every_label_of_a_spec_is_documented(module: object) -> None:
    values_of_other_labels = {labels.PUBLICATIONS, labels.MESSAGE_TYPES}
    assert labels_of(module) - NOT_OF_SPECS - values_of_other_labels <= NAMED
