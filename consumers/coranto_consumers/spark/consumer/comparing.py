"""Comparison of an application's outputs with their tables, before its consumer takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from pyspark.sql import DataFrame

from coranto.errors import CorantoError
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.spark.application.dead_letters import DeadLetters, dead_letter_outputs, no_letters
from coranto_consumers.spark.application.outputs import Outputs
from coranto_consumers.spark.outputs.stores import OutputStore

_log = structlog.get_logger(__name__)


def compare_tables(
    name: str,
    outputs: Callable[[DataFrame], Outputs],
    store: OutputStore[Any],
    nothing: DataFrame,
    misfits: MisfitPolicy | DeadLetters = MisfitPolicy.FAIL,
) -> None:
    """Raise InvalidInput for outputs that their tables in a store cannot take, or that the role may not write.

    Calls `outputs` with `nothing`, a frame without rows. An application may fail for that, because it gets no such
    frame otherwise: then nothing is compared. Raises SqlStoreError.
    """
    try:
        made = outputs(nothing)
        tables, sql = list(made.tables), list(made.sql)
    except CorantoError:
        raise
    except Exception as error:  # noqa: BLE001 - the application may raise anything
        _log.info("consumer.tables_not_compared", consumer=name, error=type(error).__name__)
        return
    if isinstance(misfits, DeadLetters) and misfits.table is not None:
        tables += dead_letter_outputs(misfits, no_letters(nothing)).tables
    store.compare(Outputs(tables, (), sql))
