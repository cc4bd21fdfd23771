"""The wheel and the sdist, built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.installation.elsewhere.environments import ROOT


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of `make dist`."""
    folder = tmp_path_factory.mktemp("dist")
    command = ["make", "--no-print-directory", "dist", f"DIST={folder}", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (found,) = built.glob("coranto-*.whl")
    return found
