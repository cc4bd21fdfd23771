"""Conversion of Coranto's errors to Airflow's errors, retryable or permanent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

from airflow_coranto.connection import with_connection_fields
from coranto.errors import CorantoError
from coranto.extras import with_install_advice


@contextmanager
def airflow_errors() -> Iterator[None]:
    """Raise Coranto's errors as AirflowException. A permanent error fails the task without retries."""
    try:
        yield
    except CorantoError as error:
        raise (AirflowFailException if error.permanent else AirflowException)(
            with_connection_fields(str(error))
        ) from error
    except ModuleNotFoundError as error:
        raise AirflowFailException(f"{with_install_advice(error)}, on the workers") from error


class TaskLog:
    """The task's log, as a `coranto.telemetry.Log`."""

    def __init__(self, log: object) -> None:
        self._log = log

    def info(self, event: str, **facts: object) -> None:
        details = " ".join(f"{name}={value}" for name, value in facts.items())
        self._log.info("%s %s", event, details)  # type: ignore[attr-defined]
