"""Clean environments with the wheel and some extras, and the available Python versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools import pythons

ROOT = Path(__file__).parents[3]
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
NEWEST = 19
"""The newest minor version of Python 3 to search for."""


def supported() -> dict[str, Path]:
    """Return the interpreters of this machine that Coranto supports, by version."""
    return {**pythons.find(NEWEST), THIS: Path(sys.executable)}


@dataclass(frozen=True)
class Environment:
    """A virtual environment that has the wheel and nothing of this checkout."""

    folder: Path
    work: Path
    """The working folder of programs."""

    @classmethod
    def make(cls, folder: Path, python: Path, wheel: Path, extras: str, constraints: Path) -> Environment:
        """Create the environment, install the wheel with `extras`, and run `pip check`."""
        subprocess.run([python, "-m", "venv", folder], check=True)
        work = folder / "work"
        work.mkdir()
        made = cls(folder, work)
        wanted = f"coranto[{extras}] @ file://{wheel}" if extras else str(wheel)
        made.run("pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints), wanted)
        made.run("pip", "check")
        return made

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment variables of a user with the environment activated and a home folder of its own."""
        omitted = re.compile(r"CORANTO_|PYTHON|VIRTUAL_ENV|AIRFLOW|DAGSTER_HOME|JDK_JAVA_OPTIONS")
        kept = {name: value for name, value in os.environ.items() if not omitted.match(name)}
        kept["PIP_CACHE_DIR"] = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
        kept["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{kept['PATH']}"
        kept["CORANTO_PORTS"] = os.environ["CORANTO_PORTS"]
        return {**kept, "HOME": str(self.work), "DAGSTER_DISABLE_TELEMETRY": "1", **more}

    def run(self, *command: str, given: str | None = None, **variables: str) -> str:
        """Run a command of the environment in its folder, and return its output. A failure shows all output."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.work,
            env=self.variables(**variables),
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def script(self, lines: list[str], **variables: str) -> str:
        """Run lines of bash with job control, and return the output. A failure shows all output."""
        done = subprocess.run(
            ["bash", "-m", "-c", "\n".join(lines)],
            cwd=self.work,
            env=self.variables(**variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        logs = "\n".join(path.read_text()[-6000:] for path in self.work.glob("*.log"))
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
        return done.stdout

    def program(self, text: str, **variables: str) -> str:
        path = self.work / "program.py"
        path.write_text(text)
        return self.run("python", path.name, **variables)


def blocks(page: str, language: str) -> list[str]:
    """Return a page's code blocks of a language, verbatim."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def block(page: str, language: str, containing: str) -> str:
    """Return the first of them that contains a text."""
    found = [each for each in blocks(page, language) if containing in each]
    assert found, f"{page} has no {language} block with {containing!r}"
    return found[0]
