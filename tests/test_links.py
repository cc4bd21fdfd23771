"""Links of the documents have targets, and the site's navigation has each page. `make docs` builds the site."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_links", ROOT / "tools" / "check_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_has_a_target(links: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert links.main() == 0, capsys.readouterr().out


def test_links_without_targets_are_reported(links: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A `head` of *it*, twice\n# A head of it, twice\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[a](b.md) [b](b.md#a-head-of-it-twice) [c](b.md#a-head-of-it-twice-1) [d](#here) [e](c.md) [f](b.md#c)\n"
        "`[g](no.md)`\n```\n[h](no.md)\n```\n# Here\n"
    )
    monkeypatch.setattr(links, "ROOT", tmp_path)
    assert links.problems(page) == ["a.md: c.md: there is no such file", "a.md: b.md#c: b.md has no such heading"]


def pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]


def test_the_site_lists_every_page_and_packages_that_exist() -> None:
    nav = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    there = {page for page in nav if not page.startswith("reference/")}
    assert there == docs | {"index.md", "changelog.md", "contributing.md"}
    for page in set(nav) - there:
        package = page.removeprefix("reference/").removesuffix(".md")
        if not package.startswith("airflow_coranto"):  # Airflow has an environment of its own.
            assert importlib.util.find_spec(package) is not None, package
    assert sys.modules.get("mkdocs") is None  # The link check does not need it.


def test_versions_of_the_sites_environment_are_recorded_without_addresses() -> None:
    lines = (ROOT / "constraints-docs.txt").read_text().splitlines()
    assert any(line.startswith("mkdocs-material==") for line in lines)
    assert all("/" not in line and "==" in line for line in lines)
