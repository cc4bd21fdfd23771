"""The oldest and the newest Dagster that the requirement allows run the tutorial and the definitions of the page."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from coranto.cluster import EmbeddedCluster
from tests.installation.elsewhere.environments import ROOT, Environment
from tests.installation.elsewhere.test_extras import dagster
from tests.orchestration.test_tutorial import following, script

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]


def oldest() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (each for each in map(Requirement, extras["dagster"]) if each.name == "dagster")
    (bound,) = (each.version for each in wanted.specifier if each.operator == ">=")
    return bound


def constraints(folder: Path, version: str) -> Path:
    """Return the repository's constraints with this version of Dagster, or without Dagster for an empty version."""
    # Early versions of Dagster need an early tomlkit.
    free = ("dagster", "tomlkit")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if not any(name in line for name in free)]
    names = ("dagster", "dagster-webserver", "dagster-dg-cli", "create-dagster") if version else ()
    path = folder / "constraints.txt"
    path.write_text("\n".join([*kept, *(f"{name}=={version}" for name in names)]))
    return path


@pytest.mark.parametrize("version", [oldest(), ""], ids=["oldest", "newest"])
def test_the_tutorial_and_the_page_work_with_this_dagster(version: str, wheel: Path, tmp_path: Path) -> None:
    made = Environment.make(tmp_path / "env", Path(sys.executable), wheel, "all,dg", constraints(tmp_path, version))
    installed = made.run("python", "-c", "import dagster; print(dagster.__version__)").strip()
    assert not version or installed == version
    with EmbeddedCluster(tmp_path / "data", brokers=1, lease_seconds=60, etcd_fsync=False) as cluster:
        dagster(made, cluster)
    text, promised = script(omitted=("python3 -m venv", ". .venv/bin/activate", "pip install 'coranto"))
    with following(text, promised, made.work, made.variables(DAGSTER_DG_UPDATE_CHECK_ENABLED="0")):
        assert (made.work / "shop" / "orders.json").exists()
