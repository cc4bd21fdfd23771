"""Each minor version of PySpark that the requirement allows supports the features that docs/spark.md promises."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.installation.elsewhere import spark_features
from tests.installation.elsewhere.environments import ROOT, THIS, Environment
from tools import pythons

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

PAGE = ROOT / "docs" / "spark.md"
TABLE = re.compile(r"<!-- table: \S+/test_spark_versions\.py -->\n(.*?)<!-- end of table -->", re.DOTALL)
VERSIONS = ("4.0", "4.1", "4.2", "4.3")
"""The newest patch of each is installed."""
PYTHONS = {**pythons.find(), THIS: Path(sys.executable)}
CASES = [
    *((version, THIS) for version in VERSIONS),
    *((version, python) for python in PYTHONS if python != THIS for version in (VERSIONS[0], VERSIONS[-1])),
]
"""Each version on this Python; the oldest and the newest on each other Python of this machine."""


def bound(operator: str) -> str:
    """Return a bound of the extra `spark` on PySpark."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (each for each in map(Requirement, extras["spark"]) if each.name == "pyspark")
    (found,) = (each.version for each in wanted.specifier if each.operator == operator)
    return found


def constraints(folder: Path, version: str) -> Path:
    """Return the repository's constraints with this version of PySpark."""
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("pyspark==")]
    path = folder / "constraints.txt"
    path.write_text("\n".join([*kept, f"pyspark~={version}.0"]))
    return path


def documented() -> dict[str, dict[str, bool | str]]:
    """Return the features by version that the page promises: true, or the version that a feature needs."""
    found = TABLE.search(PAGE.read_text())
    assert found is not None, "docs/spark.md has no table of versions"
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[1].strip().splitlines())
    return {
        version: {row[0]: cell == "yes" or cell.removeprefix("needs ") for row, cell in zip(rows, column, strict=True)}
        for version, column in zip(head[1:], list(zip(*rows, strict=True))[1:], strict=True)
    }


def test_the_page_has_each_version_and_feature() -> None:
    names = [(each.__doc__ or "").strip() for each in spark_features.FEATURES]
    assert {version: list(features) for version, features in documented().items()} == dict.fromkeys(VERSIONS, names)
    assert bound(">=") == VERSIONS[0]
    pinned = re.search(r"^pyspark==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] == VERSIONS[-1]


@pytest.mark.parametrize(("version", "python"), CASES)
def test_this_spark_supports_the_documented_features(version: str, python: str, wheel: Path, tmp_path: Path) -> None:
    made = Environment.make(tmp_path / "env", PYTHONS[python], wheel, "broker,spark", constraints(tmp_path, version))
    found = json.loads(made.program(Path(spark_features.__file__).read_text()).splitlines()[-1])
    assert found["pyspark"].startswith(f"{version}.")
    assert found["features"] == documented()[version]
