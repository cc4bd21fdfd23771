"""The choice of journals by names and selectors."""

from __future__ import annotations

from coranto.testing.command_line import CommandLine


def test_journals_are_named_or_selected(run: CommandLine, parts: tuple[str, ...]) -> None:
    for words in (["prune"], ["suspend", parts[0], "-l", "a=b"], ["edit"], ["read"], ["fragments"], ["reset-head"]):
        result = run(*words)
        assert (result.code, result.output) == (2, ""), words
        assert "--selector" in result.errors
    assert "no journal matches 'kind=none'" in run("reset-head", "-l", "kind=none").errors
    missing = run("reset-head", parts[0], "no/journal")
    assert missing.code == 1
    assert missing.errors.startswith("coranto: no/journal: JOURNAL_NOT_FOUND")


def test_a_name_replaces_a_selector(run: CommandLine, parts: tuple[str, ...]) -> None:
    assert run("reset-head", "-l", parts[1]).output == f"{parts[1]}: healthy, at 0\n"
    assert run("reset-head", "-l", "content-type").output.count("healthy") == 3
    assert run("reset-head", "-l", "").output.count("healthy") == 3
