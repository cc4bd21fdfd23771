"""The test command: failed tests run a second time, and environments belong to one interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import near_tests, pythons
from tools.run_tests import MAX_FLAKY

ROOT = Path(__file__).parent.parent
FLAKY = """
from pathlib import Path

def test_flaky():
    seen = Path(__file__).with_suffix(".seen")
    first = not seen.exists()
    seen.touch()
    assert not first
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "run_tests.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def write(folder: Path, **tests: str) -> None:
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)


@pytest.mark.parametrize("arguments", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "two processes"])
def test_a_test_that_passes_the_second_time_is_named_and_fails_no_run(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    write(tmp_path, one=FLAKY, two="def test_sound():\n    pass\n")
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "flaky: test_one.py::test_flaky"
    assert not (tmp_path / ".pytest_cache").exists()


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    write(tmp_path, one=FLAKY, two="def test_broken():\n    raise ValueError\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["flaky: test_one.py::test_flaky", "failed twice: test_two.py::test_broken"]


def test_an_error_of_a_fixture_counts_as_a_failed_test(tmp_path: Path) -> None:
    write(tmp_path, one="import pytest\n@pytest.fixture\ndef it():\n    raise ValueError\ndef test_it(it):\n    pass\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "failed twice: test_one.py::test_it"


def test_too_many_failures_fail_the_run_without_a_repetition(tmp_path: Path) -> None:
    write(tmp_path, **{f"number_{number}": FLAKY for number in range(MAX_FLAKY + 1)})
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"{MAX_FLAKY + 1} tests failed; at most {MAX_FLAKY} are repeated"


@pytest.mark.parametrize(
    ("text", "code"), [("", 5), ("import nothing_of_this_name\n", 2)], ids=["no test", "no import"]
)
def test_a_run_that_does_not_end_with_failed_tests_is_not_repeated(tmp_path: Path, text: str, code: int) -> None:
    write(tmp_path, one=text)
    done = run(tmp_path)
    assert done.returncode == code
    assert "flaky" not in done.stdout


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("platform/coranto/client/retry.py", ["tests/platform/client/test_retry.py"]),
        ("broker/coranto_broker/append/decision.py", ["tests/broker/append/test_decision.py"]),
        ("tests/platform/test_names.py", ["tests/platform/test_names.py"]),
        ("consumers/pyspark_coranto/__init__.py", ["tests/consumers"]),
    ],
)
def test_the_nearest_tests_of_a_file_are_found(file: str, tests: list[str]) -> None:
    assert list(map(str, near_tests.near(ROOT / file))) == tests


def test_a_file_without_mirrored_tests_has_the_tests_that_import_it() -> None:
    found = near_tests.near(ROOT / "broker" / "coranto_broker" / "spool" / "flush.py")
    assert Path("tests/broker/spool/test_durable_spool.py") in found


def test_a_file_without_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="is not below"):
        near_tests.near(ROOT / "tools" / "near_tests.py")


def make_environment(folder: Path) -> str:
    command = ["sh", "tools/venv.sh", sys.executable, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.exhaustive
def test_an_environment_is_kept_for_its_interpreter_and_recreated_for_another(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    assert make_environment(folder).startswith("Creating")
    (folder / "kept").touch()
    assert make_environment(folder) == ""
    assert (folder / "kept").exists()
    python = folder / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 'Python 3.11.99 (/elsewhere/python3.11)'\n")
    python.chmod(0o755)
    assert make_environment(folder).startswith("Creating")
    assert not (folder / "kept").exists()
    assert (folder / ".interpreter").read_text().strip() == pythons.identify()


def test_this_interpreter_is_found_by_its_version() -> None:
    version = f"3.{sys.version_info.minor}"
    assert version in pythons.find(newest=sys.version_info.minor)
    assert not pythons.system_differs(str(pythons.SYSTEM))
