"""The sensor that waits until journals grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowNotFoundException,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.offsets import growth, positions_at, require_same
from airflow_coranto.triggers.journal import JournalOffsetTrigger
from coranto.errors import InvalidInput
from coranto.offsets import vector_of_json

if TYPE_CHECKING:
    from coranto.client.commits import CommitWatch


class JournalSensor(BaseSensorOperator):
    """Wait until messages are committed beyond offsets of a group's journals.

    With `deferrable` (default: `[operators] default_deferrable`) it waits in the triggerer, without a worker. It checks
    every `poke_interval` seconds, and retries an unavailable cluster until `timeout`. It also takes the arguments of
    Airflow's sensors.

    With `committed=False` any bytes end the wait. If the group has no journals, the sensor logs this once, and waits.
    `beyond` maps journals to offsets, for example `heads` of an earlier task's result; the offset of an omitted journal
    is 0. Without `beyond`, the sensor waits beyond the heads at the start of the try: earlier appends do not end the
    wait. In `mode="reschedule"` each check is a new process, so `beyond` is required. The task fails if a journal was
    recreated, and its offset has the id of the earlier journal.

    Returns `{"heads", "bytes"}`. Raises InvalidInput for invalid arguments when the DAG is parsed.
    """

    template_fields: Sequence[str] = ("group", "beyond", "coranto_conn_id")
    ui_color = "#fef7e0"

    def __init__(
        self,
        *,
        group: str,
        beyond: Mapping[str, Any] | str | None = None,
        committed: bool = True,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.poke_interval <= 0:
            raise InvalidInput(f"{self.poke_interval} is not a positive number of seconds", field="poke_interval")
        if self.mode == "reschedule" and beyond is None and not deferrable:
            raise InvalidInput(
                "a rescheduled sensor is a new process at each check and cannot keep its initial heads: give "
                "`beyond`, or use deferrable=True",
                field="mode",
            )
        self.group = group
        self.beyond = beyond
        self.committed = committed
        self.deferrable = deferrable
        self.coranto_conn_id = coranto_conn_id
        self._start: dict[str, int] | None = None
        self._commits: CommitWatch | None = None
        self._warned = ""

    def execute(self, context: Any) -> Any:
        if not self.deferrable:
            return super().execute(context)
        if found := self._check():
            return found
        with airflow_errors():
            trigger = JournalOffsetTrigger(
                self.group,
                self.coranto_conn_id,
                beyond=self._offsets(),
                interval=self.poke_interval,
                committed=self.committed,
            )
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=self.timeout))

    def poke(self, context: Any) -> PokeReturnValue | bool:
        """Check once. Airflow calls this. Raises AirflowException for permanent errors; logs other errors."""
        try:
            found = self._check()
        except (AirflowFailException, AirflowNotFoundException):
            raise
        except AirflowException as error:
            self._warn(f"Journals {self.group}/… cannot be queried: {error}")
            return False
        return PokeReturnValue(is_done=True, xcom_value=found) if found else False

    def execute_complete(self, context: Any, event: Mapping[str, Any]) -> dict[str, Any]:
        """Return the event of the trigger. Airflow calls this."""
        if "error" in event:
            raise AirflowFailException(event["error"])
        return dict(event)

    def _check(self) -> dict[str, Any] | None:
        """Return the growth beyond the offsets, or None. Raises AirflowException."""
        from coranto.client.loop import run_blocking

        with airflow_errors():
            return run_blocking(self._growth())

    async def _growth(self) -> dict[str, Any] | None:
        from coranto.client import JournalClient
        from coranto.client.commits import CommitWatch
        from coranto.client.groups import JournalGroup
        from coranto.client.positions import heads_of, positions_of

        async with JournalClient.of(CorantoHook(self.coranto_conn_id).client_config()) as client:
            heads = await client.heads(JournalGroup(self.group).selector)
            now = positions_of(heads)
            if not len(heads):
                self._warn(
                    f"Waits for a journal {self.group}/… on the cluster of {self.coranto_conn_id}, which has none"
                )
            if self.beyond is None and self._start is None:
                self._start = heads_of(positions_of(heads.all_known()))
            beyond = self._offsets()
            require_same(beyond, now)
            before = positions_at(beyond, now)
            found = growth(now, before)
            if found["bytes"] and self.committed:
                self._commits = self._commits or CommitWatch()
                return found if await self._commits.since(client, before, now) else None
            return found if found["bytes"] else None

    def _offsets(self) -> dict[str, int]:
        """Return the offsets to wait beyond. Raises InvalidInput."""
        if self.beyond is None:
            return self._start or {}
        if not isinstance(self.beyond, Mapping):
            raise InvalidInput(
                f"{self.beyond!r} is not a mapping of journals to offsets; with a template, set "
                "render_template_as_native_obj on the DAG",
                field="beyond",
            )
        rendered = {name: int(at) if str(at).isdecimal() else at for name, at in self.beyond.items()}
        return vector_of_json(rendered, "beyond")

    def _warn(self, text: str) -> None:
        """Log a warning, unless it repeats the previous one."""
        if text != self._warned:
            self._warned = text
            self.log.warning("%s", text)
