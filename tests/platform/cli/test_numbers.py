"""Numbers in help texts and pages equal their constants."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coranto.cli.numbers import with_numbers
from coranto.reconcile.reconciler import BATCH_CHANGES
from coranto.streams.control.scaling import RateWindows

DOCS = Path(__file__).parents[3] / "docs"


def help_of(*words: str) -> str:
    command = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())", *words, "--help"]
    environment = {**os.environ, "COLUMNS": "400", "NO_COLOR": "1"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return " ".join(found.stdout.split())


@pytest.mark.parametrize("kind", ["journals", "shards"])
def test_the_help_of_apply_names_the_changes_of_one_transaction(kind: str) -> None:
    assert f"Up to {BATCH_CHANGES} changes are one transaction: all or none." in help_of(kind, "apply")


def test_the_help_of_autoscale_names_the_windows_of_its_rule() -> None:
    documented = help_of("streams", "autoscale")
    windows = RateWindows()
    minutes = [f"{each / 60:g}" for each in (windows.short, windows.middle, windows.long)]
    assert f"for {minutes[0]}, {minutes[1]} or {minutes[2]} minutes" in documented
    assert f"for {windows.idle / 60:g} minutes" in documented
    assert f"the first {windows.cool_down / 60:g} minutes" in documented


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("dagster.md", "more than {} changes take several transactions"),
        ("operations.md", "up to {} changes (`--max-txn-size`) all or nothing"),
        ("operations.md", "More than {} changes take several transactions"),
    ],
)
def test_pages_name_the_changes_of_one_transaction(page: str, text: str) -> None:
    assert text.format(BATCH_CHANGES) in (DOCS / page).read_text()


def test_values_replace_their_names_and_a_missing_docstring_stays_missing() -> None:
    @with_numbers(most=7)
    def documented() -> None:
        """Take {most}."""

    @with_numbers(most=7)
    def undocumented() -> None: ...

    assert (documented.__doc__, undocumented.__doc__) == ("Take 7.", None)
