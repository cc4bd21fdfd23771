"""Run the tests closest to a file: `python tools/near_tests.py platform/coranto/client/retry.py [pytest's arguments]`.

The closest tests mirror the file's name. Without such tests, it runs the tests of the file's package that import the
file, or else all tests of the package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("platform", "broker", "consumers", "orchestration")


def near(file: Path) -> list[Path]:
    """Return the tests for a file of the repository, as paths below it. Raises ValueError if there are none."""
    path = file.resolve().relative_to(ROOT)
    if path.parts[0] == "tests":
        return [path]
    if path.parts[0] not in SOURCES:
        raise ValueError(f"{path} is not below {', '.join(SOURCES)} or tests")
    source, package, *inner = path.parts
    folder = ROOT / "tests" / source / _folder(package) / Path(*inner).parent
    while not folder.is_dir():
        folder = folder.parent
    mirrored = folder / f"test_{path.stem}.py"
    if mirrored.exists():
        return [mirrored.relative_to(ROOT)]
    module = ".".join([package, *Path(*inner).with_suffix("").parts])
    importing = [test for test in sorted(folder.rglob("test_*.py")) if module in test.read_text()]
    found = importing or [folder]
    return [each.relative_to(ROOT) for each in found]


def _folder(package: str) -> str:
    """Return the folder of a package's tests, relative to the tests of its source root."""
    return {"airflow_coranto": "airflow", "coranto_flights": "flights"}.get(package, "")


def main(arguments: list[str]) -> int:
    if not arguments:
        print("name a file: make test-near FILE=platform/coranto/client/retry.py")
        return 2
    try:
        tests = near(Path(arguments[0]))
    except ValueError as error:
        print(error)
        return 2
    print(f"running {' '.join(map(str, tests))}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, tests), *arguments[1:]], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
