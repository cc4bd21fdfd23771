"""The page of audits explains every kind of finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.audit import Kind

PAGE = Path(__file__).parents[3] / "docs" / "audit.md"


@pytest.mark.parametrize("kind", list(Kind))
def test_the_page_explains_the_kind(kind: Kind) -> None:
    assert f"`{kind}`" in PAGE.read_text()
