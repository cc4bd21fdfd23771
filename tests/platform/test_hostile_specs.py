"""Specs in YAML that were made to harm the command, or the asset, that applies them."""

from __future__ import annotations

import time

import pytest

from coranto.errors import InvalidInput
from coranto.journal_tree import parse_tree

SPEC = "replication: 1, labels: [], fragment: {length: 1048576, compression_codec: NONE, refresh_interval: 1s}"


def merges(steps: int) -> str:
    """A document of merges, each of which takes effect six times as often as the one before."""
    lines = ["name: a/", "comment:", "- &a0 {replication: 1}"]
    lines += [f"- &a{step} {{<<: [{', '.join(6 * [f'*a{step - 1}'])}]}}" for step in range(1, steps)]
    return "\n".join([*lines, f"<<: *a{steps - 1}"])


def children(steps: int) -> str:
    """A tree whose folders have each folder before three times."""
    lines = ["name: a/", "comment:", "- &a0 {name: a/leaf}"]
    lines += [
        f"- &a{step} {{name: a/, children: [*a{step - 1}, *a{step - 1}, *a{step - 1}]}}" for step in range(1, steps)
    ]
    return "\n".join([*lines, f"children: [*a{steps - 1}]"])


@pytest.mark.parametrize("text", [merges(30), children(40)], ids=["merges", "children"])
def test_aliases_of_aliases_are_refused_in_bounded_time(text: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidInput, match="far too large"):
        parse_tree(text)
    assert time.process_time() - began < 5


def test_many_journals_that_merge_what_they_share_are_read() -> None:
    entries = [f"- {{<<: [*common, *more], name: 'a/part-{number:05d}'}}" for number in range(3000)]
    text = "\n".join(
        ["name: a/", "comment:", f"- &common {{{SPEC}}}", "- &more {replication: 2}", "children:", *entries]
    )
    assert [change.upsert.replication for change in parse_tree(text)] == [1] * 3000


@pytest.mark.parametrize("text", ["a: " + "[" * 1500, "{a: " * 3000, "- " * 3000 + "a"], ids=["list", "map", "block"])
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_tree(text)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("replication: 99999999999", "line 1: abcd/e: replication: '?99999999999'? is beyond"),
        ("replication: 0x" + "f" * 5000, "line 1: .* beyond 64 bits"),
        ("revision: " + "9" * 5000, "line 1: .* is not a whole number"),
        ("fragment: {length: -99999999999999999999999}", "line 1: .* beyond 64 bits"),
        ('labels: [{name: "\\ud800", value: x}]', "line 1: .* not valid Unicode"),
    ],
)
def test_values_that_no_field_can_hold_are_refused(field: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as raised:
        parse_tree(f"{{name: abcd/e, {field}}}")
    assert len(str(raised.value)) < 300
