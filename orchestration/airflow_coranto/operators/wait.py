"""The operator that waits until journals grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, BaseOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import airflow_errors
from airflow_coranto.hook import CorantoHook
from airflow_coranto.trigger import JournalOffsetTrigger


class WaitForJournalsOperator(BaseOperator):
    """Wait until messages became committed in the group beyond offsets, in the triggerer, without a worker.

    With `committed=False` any bytes end the wait. A group without journals is waited for, and the log says so once.
    `beyond` is an offset for each journal, for example `heads` of an earlier task's result; a journal that it does not
    name counts from 0. Without it, the heads at the task's start count: appends before that do not end the wait. The
    task fails if a journal was deleted, and created again, since the offset; an offset that is only a number does not
    tell. `timeout` bounds the wait. Returns `{"heads", "bytes"}`.
    """

    template_fields: Sequence[str] = ("group", "beyond", "conn_id")
    ui_color = "#fef7e0"

    def __init__(
        self,
        *,
        group: str,
        beyond: Mapping[str, Any] | str | None = None,
        interval: float = 5.0,
        committed: bool = True,
        timeout: timedelta | None = None,
        conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.group = group
        self.beyond = beyond
        self.interval = interval
        self.committed = committed
        self.timeout = timeout
        self.conn_id = conn_id

    def execute(self, context: Any) -> None:
        with airflow_errors():
            beyond = self._offsets()
            trigger = JournalOffsetTrigger(
                self.group, self.conn_id, beyond=beyond, interval=self.interval, committed=self.committed
            )
        self.defer(trigger=trigger, method_name="execute_complete", timeout=self.timeout)

    def execute_complete(self, context: Any, event: Mapping[str, Any]) -> dict[str, Any]:
        """Return the event of the trigger. Airflow calls this."""
        if "error" in event:
            raise AirflowFailException(event["error"])
        return dict(event)

    def _offsets(self) -> dict[str, int]:
        from coranto.client.groups import JournalGroup
        from coranto.client.positions import heads_of, positions_of
        from coranto.errors import InvalidInput
        from coranto.offsets import vector_of_json

        if self.beyond is None:
            with CorantoHook(self.conn_id).get_conn() as client:
                return heads_of(positions_of(client.heads(JournalGroup(self.group).selector)))
        if not isinstance(self.beyond, Mapping):
            raise InvalidInput(
                f"{self.beyond!r} is not a mapping of journals to offsets; with a template, set "
                "render_template_as_native_obj on the DAG",
                field="beyond",
            )
        rendered = {name: int(at) if str(at).isdecimal() else at for name, at in self.beyond.items()}
        return vector_of_json(rendered, "beyond")
