"""Check a release: the wheel, the sdist, the versions stated in files, and the installation of each extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
STATED = {
    "CHANGELOG.md": r"^## (\d+\.\d+\.\d+)",
    "deploy/Dockerfile": r"coranto(?:-broker)?:(\d+\.\d+\.\d+)",
    "deploy/kubernetes/base/kustomization.yaml": r"(?:coranto:|newTag: )(\d+\.\d+\.\d+)",
    "docs/installing.md": r"coranto[:-](\d+\.\d+\.\d+)",
    "docs/spark.md": r"coranto-(\d+\.\d+\.\d+)",
}
"""Files that state the version, and a pattern of the version in each. The changelog starts with the newest release."""


def wrong_versions() -> list[str]:
    """Return a description of each file whose version differs from pyproject.toml."""
    wrong = []
    for name, pattern in STATED.items():
        found = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        stated = set(found[:1] if name == "CHANGELOG.md" else found)
        if stated != {VERSION}:
            wrong.append(f"{name} states {', '.join(sorted(stated)) or 'no version'} instead of {VERSION}")
    return wrong


def main() -> int:
    if wrong := wrong_versions():
        print("\n".join(wrong))
        return 1
    with tempfile.TemporaryDirectory(prefix="coranto-release-") as folder:
        _run("make", "--no-print-directory", "dist", f"DIST={folder}", f"PYTHON={sys.executable}")
        built = sorted(Path(folder).iterdir())
        print(f"built {', '.join(path.name for path in built)}", flush=True)
        if [path.name for path in built] != [f"coranto-{VERSION}-py3-none-any.whl", f"coranto-{VERSION}.tar.gz"]:
            print(f"expected a wheel and an sdist of {VERSION}")
            return 1
        environment = Path(folder) / "venv"
        _run(sys.executable, "-m", "venv", str(environment))
        _run(str(environment / "bin" / "pip"), "install", "--quiet", "-c", "constraints.txt", "twine")
        _run(str(environment / "bin" / "twine"), "check", "--strict", *map(str, built))
    _run(sys.executable, "-m", "pytest", "tests/installation/elsewhere/test_extras.py", CORANTO_TEST_INSTALL="1")
    return 0


def _run(*command: str, **variables: str) -> None:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
