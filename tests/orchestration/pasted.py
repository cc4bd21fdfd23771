"""Paste every code block of a page into the tutorial's project, and run it there.

A block is named by a text that it contains. A page's test must take each block once, so a new block fails the test
until the test runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return the kinds and contents of a page's code blocks, in order."""
    return [(found["kind"], found["content"]) for found in _BLOCK.finditer((ROOT / "docs" / page).read_text())]


class Page:
    """The blocks of a page. A test takes each of them once."""

    def __init__(self, name: str) -> None:
        self._blocks = blocks_of(name)

    def take(self, kind: str, containing: str, replaced: Mapping[str, str] | None = None) -> str:
        """Return the next block of a kind that contains a text, with the addresses of examples replaced."""
        (index, content) = next(
            (index, content)
            for index, (each, content) in enumerate(self._blocks)
            if each == kind and containing in content
        )
        del self._blocks[index]
        for before, after in (replaced or {}).items():
            assert before in content, f"{before!r} is not in {content}"
            content = content.replace(before, after)
        return content

    def commands(self, containing: str, replaced: Mapping[str, str] | None = None) -> list[str]:
        """Return the commands of the next console block that contains a text."""
        shown = self.take("console", containing, replaced).splitlines()
        return [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]

    def require_all(self) -> None:
        """Fail if a block was not taken."""
        assert self._blocks == [], "the test does not run these blocks"


@dataclass(frozen=True)
class Project:
    """The tutorial's project, its cluster, and the environment of its user."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def data(self) -> Path:
        return self.folder.parent / "data"

    def run(self, *command: str, **variables: str) -> str:
        """Run a command in the project's folder, and return its output. Fail with the output if it fails."""
        return self.bash(['exec "$@"'], command, **variables)

    def bash(self, lines: Sequence[str], arguments: Sequence[str] = (), **variables: str) -> str:
        """Run shell lines, up to the first one that fails."""
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join(lines), "bash", *arguments],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{lines}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return done.stdout + done.stderr

    def program(self, text: str, **variables: str) -> str:
        """Run a Python program, and return its output."""
        path = self.folder.parent / "program.py"
        path.write_text(text)
        return self.run(sys.executable, str(path), **variables)

    @contextmanager
    def pasted(self, files: Mapping[str, str]) -> Iterator[None]:
        """Write files below `src/shop`, and remove them when the context ends."""
        paths = [self.folder / "src" / "shop" / name for name in files]
        for path, text in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        try:
            yield
        finally:
            for path in paths:
                path.unlink()


LOADED = """
from pathlib import Path
from types import SimpleNamespace
import dagster as dg
from coranto.cluster import locate
from dagster_coranto import *

instance = dg.DagsterInstance.get()
defs = dg.load_from_defs_folder(path_within_project=Path.cwd())
assert defs.resolve_job_def("consume_revenue_job")


def run(job, **options):
    result = defs.resolve_job_def(job).execute_in_process(instance=instance, **options)
    assert result.success
    return result
"""
"""The beginning of a page's programs: the definitions of the whole project, and a function that runs a job."""


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of the tutorial's user, with `folder` as the home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    return {
        **kept,
        "CORANTO_PORTS": os.environ["CORANTO_PORTS"],
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # As in an activated environment.
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }


def project_of(folder: Path) -> Project:
    """Return the tutorial's project below `folder`, with a running cluster."""
    shop = folder / "shop"
    return Project(
        shop,
        {
            **environment_of(folder),
            "CORANTO_DATA": str(folder / "data"),
            "CORANTO_STORE_URL": f"sqlite:///{folder / 'shop.db'}",
            "DAGSTER_HOME": str(folder / "dagster_home"),
            "PYTHONPATH": os.pathsep.join([str(shop / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        },
    )
