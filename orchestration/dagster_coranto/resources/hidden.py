"""Secrets of resources, hidden from everything that Dagster shows.

Dagster shows the configuration of resources in its UI, stores it with each job, and sends it to its web server. So the
configuration has a placeholder for each literal secret, and the secret itself stays in this process. Every process that
loads the definitions makes the same placeholders for the same literals.
"""

from __future__ import annotations

import threading
from typing import Final

import dagster as dg

from coranto.errors import InvalidInput

_MARK: Final = "[hidden"

_lock: Final = threading.Lock()
_placeholders: Final[dict[str, str]] = {}
_secrets: Final[dict[str, str]] = {}


def hide(secret: str, shown: str = "") -> str:
    """Return the placeholder of a literal secret: `[hidden]`, followed by the part of it that may be `shown`.

    Empty texts, `dg.EnvVar`s and placeholders are returned unchanged.
    """
    if not secret or isinstance(secret, dg.EnvVar) or secret in _secrets:
        return secret
    with _lock:
        found = _placeholders.get(secret)
        number = 1
        while found is None:
            candidate = f"{_MARK}]" if number == 1 else f"{_MARK} {number}]"
            candidate = f"{candidate} {shown}".rstrip()
            number += 1
            if candidate not in _secrets:
                found = candidate
        _placeholders[secret] = found
        _secrets[found] = secret
    return found


def reveal(text: str) -> str:
    """Return the secret of a placeholder, or any other text unchanged. Raises InvalidInput for an unknown one."""
    if not text.startswith(_MARK):
        return text
    try:
        return _secrets[text]
    except KeyError:
        raise InvalidInput(
            f"{text} stands for a secret that this process does not know; give the secret as dg.EnvVar(…)",
            field="resource",
        ) from None
