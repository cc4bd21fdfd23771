"""Names of publications, and keys of rows. Does not import Airflow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from coranto.errors import InvalidInput

RowKey = str | Callable[[Mapping[str, Any]], str | bytes]
"""The column whose value chooses the journal, or a function of the row."""

_PLAIN = re.compile(r"[A-Za-z0-9._-]*").fullmatch


def writer_id_of(namespace: str, dag_id: str, run_id: str, task_id: str, map_index: int | None, edition: str) -> str:
    """Return the unique name of a task instance's publication.

    Only the run id may contain slashes, so two task instances never have the same name. Raises InvalidInput.
    """
    for name, value in (("namespace", namespace), ("edition", edition)):
        if not _PLAIN(value):
            raise InvalidInput(f"{value!r} has characters other than letters, digits, '.', '_' and '-'", field=name)
    index = "" if map_index is None or map_index < 0 else str(map_index)
    return f"{namespace}/{dag_id}/{run_id}/{task_id}/{index}/{edition}"


def key_function(key: RowKey) -> Callable[[Mapping[str, Any]], bytes]:
    """Return the function from a row to its key. It raises InvalidInput for a row without the column."""

    def of(row: Mapping[str, Any]) -> bytes:
        if callable(key):
            value: Any = key(row)
        elif key in row:
            value = row[key]
        else:
            raise InvalidInput(f"a row has no column {key!r}; it has {', '.join(map(str, row))}", field="key")
        return value if isinstance(value, bytes) else str(value).encode()

    return of
