"""docs/airflow.md shows the DAG that is tested, and names commands and operators that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "airflow.md").read_text()
PACKAGE = ROOT / "orchestration" / "airflow_coranto"


def test_the_page_shows_the_dag_of_the_flights() -> None:
    assert (PACKAGE / "flights" / "dags" / "flights.py").read_text() in PAGE


def test_every_named_operator_exists() -> None:
    exported = (PACKAGE / "operators" / "__init__.py").read_text()
    named = set(re.findall(r"`(\w+Operator)`", PAGE))
    assert len(named) >= 5
    for name in named:
        assert f'"{name}"' in exported


def test_every_named_target_of_make_exists() -> None:
    targets = set(re.findall(r"make ([a-z-]+)", PAGE))
    makefile = (ROOT / "Makefile").read_text()
    assert {"airflow", "test-airflow"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_versions_of_the_environment_are_recorded_without_addresses() -> None:
    lines = (ROOT / "constraints-airflow.txt").read_text().splitlines()
    assert len(lines) > 100
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", line) for line in lines)
