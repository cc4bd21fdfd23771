"""Errors of tasks. They reach the driver with their types and fields, although Spark passes on only text.

A task's error gets a note of one line, JSON in base64, so that the error's text is readable only once. The traceback of
an InvalidInput is left out, because it shows only Coranto's own modules.
"""

from __future__ import annotations

import json
import os
import re
import sys
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pyspark.errors import PySparkException

from coranto.errors import CorantoError, InvalidInput, Outcome

_MARK: Final = "coranto-error: "
_LINE: Final = re.compile(re.escape(_MARK) + r"([0-9A-Za-z_=-]+)")
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""Spark's environment variable that omits the traceback when a worker ends with an error."""
_LACKING: Final = re.compile(r"No module named '(coranto|coranto_consumers|pyspark_coranto|pyspark_coranto_name)[.']")
"""Matches the import errors of executors without Coranto."""
_NOT_DISCOVERED: Final = re.compile(r"\[DATA_SOURCE_NOT_FOUND\][^\n]*\b(journal|coranto)\b")


@contextmanager
def errors_to_driver() -> Iterator[None]:
    """Add a note to Coranto's errors, which `error_of_task` decodes. Wrap all work of a task in this context."""
    try:
        yield
    except CorantoError as error:
        if not any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_MARK}{_dumps(error)}")
        if isinstance(error, InvalidInput) and _is_worker():
            os.environ[_HIDE_TRACEBACK] = "1"
        raise


@contextmanager
def errors_of_tasks() -> Iterator[None]:
    """Raise the Coranto error that ended a task or a query instead of Spark's error."""
    try:
        yield
    except PySparkException as error:
        ours = error_of_task(error)
        if ours is None:
            raise
        raise ours from error


def error_of_task(error: BaseException) -> CorantoError | None:
    """Return the Coranto error, with plain fields, that ended a task or a query. None for other errors."""
    # Only the last match is certainly a note: earlier ones may be quoted text.
    for found in reversed(_LINE.findall(str(error))):
        try:
            encoded = json.loads(urlsafe_b64decode(found))
            kind, text, fields = _kinds()[encoded["type"]], encoded["text"], encoded["fields"]
            ours = kind.__new__(kind, text)
            ours.outcome = Outcome(encoded["outcome"])
        except (ValueError, KeyError, TypeError):
            continue
        for name, value in fields.items():
            setattr(ours, name, value)
        return ours
    if lacking := _LACKING.search(str(error)):
        return InvalidInput(
            f"executors have no package {lacking[1]}: install coranto[spark] in their environment, or give it to the "
            "session (docs/spark.md, On a cluster)",
            field="cluster",
        )
    if found := _NOT_DISCOVERED.search(str(error)):
        return InvalidInput(
            f"Spark's workers do not know the data source {found[1]}. They run on the interpreter that PYSPARK_PYTHON "
            f"names ({os.environ.get('PYSPARK_PYTHON', 'not set: python3 of the PATH')}), and this process runs on "
            f"{sys.executable}: install coranto[spark] there, or set PYSPARK_PYTHON to this one and start again",
            field="PYSPARK_PYTHON",
        )
    return None


def text_of_task(error: CorantoError) -> str:
    """Encode an error as text for Spark's `raise_error`. `error_of_task` decodes it."""
    return f"{error} {_MARK}{_dumps(error)}"


def _dumps(error: CorantoError) -> str:
    fields = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | bool | None)}
    encoded: dict[str, Any] = {"type": type(error).__name__, "text": str(error), "fields": fields}
    return urlsafe_b64encode(json.dumps({**encoded, "outcome": error.outcome.value}).encode()).decode()


def _is_worker() -> bool:
    """Return True in a process that Spark has started for a task or a plan. The process ends with its error.

    Returns False in the process of a streaming reader: Spark replaces an error at its start, and only the traceback
    shows both errors.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.") and ".streaming." not in spec.name


def _kinds() -> dict[str, type[CorantoError]]:
    kinds: dict[str, type[CorantoError]] = {}
    left: list[type[CorantoError]] = [CorantoError]
    while left:
        kind = left.pop()
        kinds[kind.__name__] = kind
        left += kind.__subclasses__()
    return kinds
