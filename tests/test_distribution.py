"""The wheel that `make dist` builds: it is complete, and its client is light."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
