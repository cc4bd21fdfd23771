"""Examine this machine: Python, the installed extras, Java, ports, and the folder of a broker's data."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from coranto.checkup.results import Examination, absent, good, problem, warning
from coranto.cluster.processes import PORTS_VARIABLE, free_port, is_free
from coranto.errors import ClusterError, InvalidInput
from coranto.extras import PARTS
from coranto.process.java import java_program

OLDEST_PYTHON: Final = (3, 11)
NEWEST_TRIED: Final = (3, 13)
OLDEST_JAVA: Final = 17
_JAVA_SECONDS: Final = 30.0
_INSTALL_JAVA: Final = (
    "install Java 17 or newer (openjdk-17-jre-headless), and let JAVA_HOME name it, or unset JAVA_HOME"
)


def python(version: tuple[int, int] = sys.version_info[:2]) -> Examination:
    """Examine the version of Python."""
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if version < OLDEST_PYTHON:
        return problem("Python", found, "make the environment with Python 3.11 or newer")
    if version > NEWEST_TRIED:
        return warning("Python", found, f"Coranto is tested on Python 3.11 to 3.{NEWEST_TRIED[1]}; prefer one of these")
    return good("Python", found)


def parts() -> list[Examination]:
    """Examine the core and the extras. A part with missing modules, or with versions that do not fit, is unusable."""
    unmet = _unmet("")
    found = ", ".join(unmet) or "installed, in versions that fit"
    results = [problem("coranto", found, "pip install --upgrade coranto") if unmet else good("coranto", found)]
    for extra, modules in PARTS.items():
        missing, broken = [], ""
        for module in modules:
            try:
                if importlib.util.find_spec(module) is None:
                    missing.append(module)
            except (ImportError, ValueError) as error:
                broken = f"{module}: {error}"
        subject = f"coranto[{extra}]"
        again = f"pip install 'coranto[{extra}]'"
        if len(missing) == len(modules):
            results.append(absent(subject, "not installed", again))
        elif broken:
            results.append(problem(subject, broken, again))
        elif unmet := [f"without {module}" for module in missing] or _unmet(extra):
            # Other packages may have installed these modules, so this part may be unwanted.
            advice = f"if you want this part: pip install --upgrade 'coranto[{extra}]'"
            results.append(warning(subject, f"cannot be used: {', '.join(unmet)}", advice))
        else:
            results.append(good(subject, "installed"))
    return results


def _unmet(extra: str) -> list[str]:
    """Return the requirements of an extra, or of the core for "", that no installed distribution meets."""
    found = []
    for text in importlib.metadata.requires("coranto") or ():
        wanted = Requirement(text)
        of_core = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if of_core != (not extra) or (wanted.marker is not None and not wanted.marker.evaluate({"extra": extra})):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"without {wanted.name}")
        else:
            if not wanted.specifier.contains(version, prereleases=True):
                found.append(f"{wanted.name} is {version}, and must be {wanted.specifier}")
    return found


def has_spark() -> bool:
    """Return True if Spark is installed, which needs Java."""
    return importlib.util.find_spec("pyspark") is not None


def java(*, needed: bool) -> Examination:
    """Examine Java, which Spark needs. `needed` is true if Spark is installed."""
    home, program = os.environ.get("JAVA_HOME"), java_program()
    if program is None or not os.access(program, os.X_OK):
        found = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "not installed"
        return problem("Java", found, _INSTALL_JAVA) if needed else absent("Java", f"{found}; only Spark needs it")
    try:
        output = subprocess.run(
            [program, "-version"], capture_output=True, text=True, errors="replace", check=False, timeout=_JAVA_SECONDS
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return problem("Java", f"{program} does not run: {error}", _INSTALL_JAVA)
    numbers = re.search(r'version "(?:1\.)?(\d{1,9})', output)
    if numbers is None:
        return problem("Java", f"{program} reports no version", _INSTALL_JAVA)
    found = f"Java {numbers[1]} at {program}"
    if int(numbers[1]) >= OLDEST_JAVA:
        return good("Java", found)
    return problem("Java", found, _INSTALL_JAVA) if needed else warning("Java", found, _INSTALL_JAVA)


def ports(wanted: Iterable[int]) -> list[Examination]:
    """Examine the port range of embedded clusters, and the ports that a broker will listen on."""
    try:
        free_port()
        results = [good("ports", f"there are free ones in ${PORTS_VARIABLE} (by default 20000-29999)")]
    except (ClusterError, InvalidInput) as error:
        results = [problem("ports", str(error), f"set ${PORTS_VARIABLE} to a range such as 20000-20999")]
    for port in wanted:
        if is_free(port):
            results.append(good(f"port {port}", "free"))
        else:
            advice = "end what listens there (ss -ltnp names it), or choose another port; ports below 1024 need rights"
            results.append(problem(f"port {port}", "taken, or not allowed", advice))
    return results


def data_directory(path: Path) -> Examination:
    """Check that the folder of a broker's data is writable and has free space."""
    subject, probe = f"folder {path}", path / ".coranto-doctor"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
        available = shutil.disk_usage(path).free
    except OSError as error:
        return problem(subject, error.strerror or str(error), "make the folder, and let the broker's user write to it")
    if available < 1 << 30:
        return warning(subject, f"{available >> 20} MiB are free", "free space: content waits here until it is stored")
    return good(subject, f"can be written; {available >> 30} GiB are free")
