"""Access to Airflow variables from a trigger, for Airflow 3.1 and later."""

from __future__ import annotations

from typing import Final

from airflow.providers.common.compat.sdk import Variable
from asgiref.sync import sync_to_async

DESCRIPTION: Final = "Positions of a watcher of journals (Coranto)"


async def get_variable(name: str) -> str | None:
    """Return a variable's value, or None if it does not exist."""
    found: str | None = await sync_to_async(Variable.get)(name, default=None)
    return found


async def set_variable(name: str, value: str) -> None:
    """Write a variable."""
    await sync_to_async(Variable.set)(name, value, description=DESCRIPTION)
