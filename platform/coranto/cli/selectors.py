"""Selectors on the command line, where a path may stand for the journals that it names."""

from __future__ import annotations

import re


def selector_of(text: str) -> str:
    """Return a selector of labels. A path stands for the journal of that name or, with a slash at its end, for all
    journals below it.
    """
    text = text.strip()
    if "/" not in text or re.search(r"[=!,() ]", text):
        return text
    return f"name:prefix={text}" if text.endswith("/") else f"name={text}"
