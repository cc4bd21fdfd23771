"""The architecture page names packages and files that exist, and orchestrator integrations are thin."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LINK = re.compile(r"\[(`?)([^\]`]+)`?\]\(([^)#]+)\)")
PACKAGES = {
    "### The platform, bottom up": ROOT / "platform" / "coranto",
    "### The broker, bottom up": ROOT / "broker" / "coranto_broker",
    "### Consumers, bottom up": ROOT / "consumers" / "coranto_consumers",
    "### Spark consumers, bottom up": ROOT / "consumers" / "coranto_consumers" / "spark",
    "### The Airflow integration, bottom up": ROOT / "orchestration" / "airflow_coranto",
    "### The Dagster integration, bottom up": ROOT / "orchestration" / "dagster_coranto",
    "### Streams, bottom up": ROOT / "platform" / "coranto" / "streams",
}


def section(title: str) -> str:
    return PAGE.read_text().partition(f"{title}\n")[2].partition("\n##")[0]


def layers_of(title: str) -> list[list[str]]:
    """Return the packages of a section's list, from the bottom up."""
    (listed,) = re.findall(r"^> .*(?:\n> .*)*", section(title), re.MULTILINE)
    return [re.findall(r"`([^`]+)`", layer) for layer in listed.split("→")]


def packages_of(title: str) -> set[str]:
    return {name for layer in layers_of(title) for name in layer}


def test_every_link_leads_to_a_file_that_has_the_named_class() -> None:
    links = LINK.findall(PAGE.read_text())
    assert len(links) > 20
    for quoted, name, target in links:
        path = (PAGE.parent / target).resolve()
        assert path.exists(), f"{PAGE.name} links to {target}, which does not exist"
        if quoted and name.isidentifier() and name[0].isupper():
            assert re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE), f"{target} has no class {name}"


def test_every_package_is_described() -> None:
    for title, folder in PACKAGES.items():
        present = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
        named = packages_of(title)
        assert present <= named, f"{title}: {sorted(present - named)} are not described"
        for name in named:
            assert (folder / name).is_dir() or (folder / f"{name}.py").is_file(), f"{title}: there is no {name}"
        for name in present - {"wire"}:
            text = ast.get_docstring(ast.parse((folder / name / "__init__.py").read_text()))
            assert text, f"{title}: {name} has no docstring"


def imported_packages(package: Path, folder: Path) -> set[str]:
    """Return the other packages of a folder that a package or module imports."""
    dotted = ".".join(folder.relative_to(ROOT).parts[1:])
    names = set()
    for path in package.rglob("*.py") if package.is_dir() else [package.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {f"{each.name}." for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{each.name}." for each in node.names}
    inner = {name.removeprefix(f"{dotted}.").partition(".")[0] for name in names if name.startswith(f"{dotted}.")}
    return inner - {package.name}


@pytest.mark.parametrize("title", PACKAGES)
def test_packages_are_listed_bottom_up(title: str) -> None:
    """Each package imports only packages of its own layer and of the layers before it."""
    rank = {name: number for number, layer in enumerate(layers_of(title)) for name in layer}
    upwards = [
        (name, other)
        for name, number in rank.items()
        for other in imported_packages(PACKAGES[title] / name, PACKAGES[title])
        if rank.get(other, 0) > number
    ]
    assert not upwards, f"{title}: these import packages that are listed after them"


OF_THEIR_ORCHESTRATOR = {
    "dagster": {
        "version.py": "the version of Dagster's integration",
    },
    "airflow": {
        "connection.py": "the meaning of Airflow's connections",
        "flights/standalone.py": "the processes of an Airflow",
        "offsets.py": "what Airflow's variables and events have of journals",
        "get_provider_info.py": "what Airflow asks a provider for",
        "rows.py": "names that a task instance gives to publications",
        "store_url.py": "the meaning of Airflow's connections",
    },
}
"""Modules that import nothing of their orchestrator but are specific to it, with the reason."""


@pytest.mark.parametrize("orchestrator", OF_THEIR_ORCHESTRATOR)
def test_an_integration_has_no_code_that_another_orchestrator_needs(orchestrator: str) -> None:
    """Code that does not depend on the orchestrator belongs to a lower layer: `coranto` or `coranto_consumers`."""
    folder = ROOT / "orchestration" / f"{orchestrator}_coranto"
    neutral = set()
    for path in folder.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
        if path.name != "__init__.py" and names.isdisjoint((orchestrator, folder.name)):
            neutral.add(str(path.relative_to(folder)))
    assert neutral == OF_THEIR_ORCHESTRATOR[orchestrator].keys()
