"""The wheel that `make dist` builds: it is complete, and its client is light."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import licenses, release_check

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "platform/coranto",
    "broker/coranto_broker",
    "consumers/coranto_consumers",
    "consumers/pyspark_coranto",
    "orchestration/coranto_flights",
    "orchestration/airflow_coranto",
    "orchestration/dagster_coranto",
)
HEAVY = (
    "numpy",
    "pyarrow",
    "pandas",
    "pyspark",
    "sqlalchemy",
    "dagster",
    "airflow",
    "aiohttp",
    "duckdb",
    "polars",
    "pyiceberg",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("coranto-*.whl")
    return built


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    )
    tracked = {name.partition("/")[2] for name in listed.stdout.split() if (ROOT / name).exists()}
    assert len(tracked) > 400
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert tracked <= inside
    assert not [name for name in inside if "__pycache__" in name]


def test_the_wheel_states_its_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    stated = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    assert stated["License-Expression"] == "Apache-2.0"
    assert stated["Author"]
    assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_all_files_state_the_same_version() -> None:
    assert release_check.wrong_versions() == []


@pytest.mark.parametrize(
    ("expression", "compatible"),
    [
        ("MIT", True),
        ("Apache-2.0 AND (MIT OR BSD-3-Clause)", True),
        ("GPL-3.0-only", False),
        ("MIT AND none stated", False),
    ],
)
def test_licenses_are_judged_by_each_of_their_parts(expression: str, compatible: bool) -> None:
    assert licenses.is_compatible(expression) is compatible


def test_all_requirements_are_found() -> None:
    found = licenses.required("coranto", frozenset({"lake"}))
    assert {"grpcio", "duckdb", "pyiceberg", "pyroaring", "sqlalchemy"} <= found
    assert "dagster" not in found


def test_the_wheels_client_imports_nothing_of_the_extras(wheel: Path) -> None:
    program = (
        "import sys, coranto.cli, coranto.cli.journals, coranto.client, coranto.lake, coranto.client.publishing\n"
        "import coranto.messages, coranto.streams\n"
        f"print(coranto.__file__, *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True, cwd=wheel.parent
    )
    assert done.stdout.split() == [f"{wheel}/coranto/__init__.py"]
