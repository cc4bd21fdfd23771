"""The tutorial runs from the wheel in an empty folder, without a clone."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.installation.elsewhere.environments import ROOT, Environment
from tests.orchestration.test_tutorial import following, script


def test_the_tutorial_needs_no_clone(wheel: Path, tmp_path: Path) -> None:
    made = Environment.make(tmp_path / "env", Path(sys.executable), wheel, "all,dg", ROOT / "constraints.txt")
    text, promised = script(omitted=("python3 -m venv", ". .venv/bin/activate", "pip install 'coranto"))
    assert "pip install --editable ." in text
    with following(text, promised, made.work, made.variables(DAGSTER_DG_UPDATE_CHECK_ENABLED="0")):
        assert (made.work / "shop" / "orders.json").exists()
