"""`make docs` builds the site in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.installation.elsewhere.environments import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def test_the_site_has_every_page_and_the_reference(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = ["make", "--no-print-directory", "docs", f"PYTHON={sys.executable}"]
    folders = [f"DOCS_VENV={tmp_path / 'env'}", f"SITE={site}"]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert not [page for page in pages if not (site / page / "index.html").is_file()]
    assert "SyncJournalClient" in (site / "reference" / "coranto.client" / "index.html").read_text()
