"""Find the Python interpreters that Coranto supports, and run the interpreter-dependent tests on each."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = 11
NEWEST = 13
"""Minor versions of Python 3 that Coranto supports, both inclusive."""

ROOT = Path(__file__).parent.parent
SYSTEM = Path("/usr/bin/python3")


def identify() -> str:
    """Return the version and the path of this interpreter. A virtual environment does not change them."""
    return f"Python {sys.version.split()[0]} ({os.path.realpath(_base())})"


def _base() -> str:
    """Return the path of the interpreter of this environment, also in a virtual environment."""
    return str(getattr(sys, "_base_executable", sys.executable))


def find(newest: int = NEWEST) -> dict[str, Path]:
    """Return an interpreter for each minor version from `OLDEST` to `newest`: on PATH, in pyenv, or this one.

    An interpreter that cannot create a virtual environment does not count.
    """
    found: dict[str, Path] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(OLDEST, newest + 1):
        version = f"3.{minor}"
        on_path = shutil.which(f"python{version}")
        candidates = [on_path, *sorted(pyenv.glob(f"{version}.*/bin/python")), _base()]
        for candidate in candidates:
            if version not in found and candidate and _answers(Path(candidate), version):
                found[version] = Path(candidate)
    return found


def system_differs(python: str) -> bool:
    """Return True if the system's Python is supported and differs from the interpreter of the command `python`."""
    if not SYSTEM.exists():
        return False
    versions = [f"3.{minor}" for minor in range(OLDEST, NEWEST + 1)]
    return any(_answers(SYSTEM, version) for version in versions) and _identity(str(SYSTEM)) != _identity(python)


def _answers(python: Path, version: str) -> bool:
    command = [python, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


def _identity(python: str) -> str:
    return subprocess.run([python, __file__, "--identify"], capture_output=True, text=True, check=True).stdout


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    mode = arguments.add_mutually_exclusive_group()
    mode.add_argument("--identify", action="store_true", help="print the version and the path of this interpreter")
    mode.add_argument("--system-differs", metavar="PYTHON", help="exit with 0 if the system's Python differs")
    given = arguments.parse_args()
    if given.identify:
        print(identify())
        return 0
    if given.system_differs:
        return 0 if system_differs(given.system_differs) else 1
    found, failed = find(), []
    for version, python in found.items():
        print(f"{version}: {python}", flush=True)
        command = ["make", "--no-print-directory", "test-parsers", f"PYTHON={python}", f"VENV=.venv-{version}"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(version)
    missing = [f"3.{minor}" for minor in range(OLDEST, NEWEST + 1) if f"3.{minor}" not in found]
    print(f"passed: {', '.join(version for version in found if version not in failed) or 'none'}")
    print(f"failed: {', '.join(failed) or 'none'}")
    print(f"not found: {', '.join(missing) or 'none'}")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
