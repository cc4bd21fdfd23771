"""The trigger that waits until journals have grown."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_coranto import offsets
from airflow_coranto.connection import DEFAULT_CONNECTION, with_connection_fields
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.variables import get_variable, set_variable
from coranto.errors import CorantoError, InvalidInput, JournalRecreated, PermissionDenied, Unauthenticated
from coranto.offsets import vector_of_json, vector_to_json

if TYPE_CHECKING:
    from coranto.client import JournalClient
    from coranto.client.positions import JournalPosition

_MAX_PAUSE: Final = 60.0


class JournalOffsetTrigger(BaseEventTrigger):
    """Trigger that fires when messages are committed in the journals of a group.

    Messages of open or rolled-back transactions do not count. To check this, the trigger reads the content of journals
    whose label `content-type` is JSON lines. In other journals, and in all journals with `committed=False`, any
    appended byte counts.

    *In an asset's watcher* (without `beyond`) it fires repeatedly, at most once per `interval` seconds, whenever at
    least `min_bytes` were appended since the last event, and messages were committed. Each byte belongs to one event.
    The positions are stored in an Airflow variable, in the transaction that stores the event
    (`airflow_coranto.plugins.listener`). So a restarted or replaced triggerer continues at the end of the last stored
    event. The first start begins at the current heads, or with `earliest` at offset 0. The variable is identified by
    `name`, by default by all arguments except `committed`.

    *For a task that waits* (with `beyond`) it fires once, when messages are committed beyond a journal's offset in
    `beyond` (default: 0). Restarts are safe, because `beyond` is stored with the trigger. An offset is a number, or an
    object with the id of its journal, as in events and results (`{"offset": 1024, "journal_id": "…"}`). If the journal
    was recreated with another id, the task gets an event with `error` and `recreated`.

    The trigger retries while the cluster does not answer. A task gets an event with `error` for a permanent failure,
    such as a rejected token.
    """

    def __init__(
        self,
        group: str,
        coranto_conn_id: str = DEFAULT_CONNECTION,
        beyond: Mapping[str, Any] | None = None,
        interval: float = 5.0,
        min_bytes: int = 1,
        earliest: bool = False,
        name: str = "",
        committed: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if interval <= 0 or min_bytes < 1:
            raise InvalidInput(f"interval {interval} and min_bytes {min_bytes} must be positive", field="trigger")
        self.group = group
        self.coranto_conn_id = coranto_conn_id
        self.beyond = vector_of_json(beyond, "beyond") if beyond is not None else None
        self.interval = interval
        self.min_bytes = min_bytes
        self.earliest = earliest
        self.name = name
        self.committed = committed
        self._logged_error = ""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "airflow_coranto.triggers.journal.JournalOffsetTrigger", self._arguments

    @property
    def _arguments(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "coranto_conn_id": self.coranto_conn_id,
            "beyond": vector_to_json(self.beyond) if self.beyond is not None else None,
            "interval": self.interval,
            "min_bytes": self.min_bytes,
            "earliest": self.earliest,
            "name": self.name,
            "committed": self.committed,
        }

    @property
    def variable(self) -> str:
        """The name of the variable that keeps a watcher's positions."""
        return offsets.variable_name(self.name, self._arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        # Importing the client takes a while; other triggers share this event loop.
        await asyncio.to_thread(importlib.import_module, "coranto.client")
        from coranto.client.positions import grown_bytes

        heads = _Heads(self.group, self.coranto_conn_id, self.interval, self.committed, self.log)
        if self.beyond is not None:
            beyond = self.beyond
            heads.before = partial(offsets.positions_at, beyond)
            try:
                async for now in heads.each(fail=True):
                    offsets.require_same(beyond, now)
                    found = offsets.growth(now, offsets.positions_at(beyond, now))
                    if heads.is_committed and found["bytes"]:
                        yield TriggerEvent(found)
                        return
            except JournalRecreated as error:
                yield TriggerEvent({"error": with_connection_fields(str(error)), "recreated": True})
            except CorantoError as error:
                yield TriggerEvent({"error": with_connection_fields(str(error))})
            return
        last: offsets.StoredEvent | None = None
        async for now in heads.each(fail=False):
            if last is None:
                if (last := await self._first(now)) is not None:
                    event, positions = last.event, offsets.from_stored(last.positions)
                    heads.before = partial(_fixed, positions)
                continue
            grown = grown_bytes(now, positions)
            if heads.is_committed and grown >= self.min_bytes:
                payload = offsets.event_of(self.group, self.variable, event, positions, now, grown)
                yield TriggerEvent(payload)
                event, positions = payload["event"], now
                heads.before = partial(_fixed, positions)

    async def _first(self, now: dict[str, JournalPosition]) -> offsets.StoredEvent | None:
        """Return the last stored event. Before the first event, store and return its start positions.

        Returns None if the variable is invalid, because new start positions could skip content.
        """
        kept = await get_variable(self.variable)
        if kept is not None:
            try:
                return offsets.StoredEvent.from_json(kept)
            except InvalidInput as error:
                if self._logged_error != str(error):
                    self._logged_error = str(error)
                    self.log.error("Variable %s: %s", self.variable, error)  # noqa: TRY400  # the text says it all
                return None
        begin = offsets.StoredEvent(offsets.new_event_id(), offsets.to_stored({} if self.earliest else now))
        await set_variable(self.variable, begin.to_json())
        return begin


def _fixed(positions: Mapping[str, JournalPosition], now: object) -> Mapping[str, JournalPosition]:
    return positions


class _Heads:
    """Poller of the positions of a group's journals."""

    before: Callable[[Mapping[str, JournalPosition]], Mapping[str, JournalPosition]] | None = None
    """The start positions of the check for committed messages. None: nothing is checked yet."""
    is_committed = False
    """True if the last check found committed messages beyond `before`."""

    def __init__(self, group: str, coranto_conn_id: str, interval: float, committed: bool, log: Any) -> None:
        from coranto.client.commits import CommitWatch
        from coranto.client.groups import JournalGroup

        self._commits = CommitWatch() if committed else None
        self._is_missing = False
        self._group = JournalGroup(group)
        self._hook = CorantoHook(coranto_conn_id)
        self._interval = interval
        self._log = log
        self._client: JournalClient | None = None
        self._positions: dict[str, JournalPosition] = {}

    async def each(self, *, fail: bool) -> AsyncIterator[dict[str, JournalPosition]]:
        """Yield the positions every `interval` seconds. Retries after errors; with `fail`, raises permanent errors."""
        pause, problem = self._interval, ""
        try:
            while True:
                try:
                    positions = await self._ask()
                except Exception as error:  # a watcher that ends would miss events silently
                    if fail and isinstance(error, InvalidInput | Unauthenticated | PermissionDenied):
                        raise
                    if fail and not isinstance(error, CorantoError):
                        raise InvalidInput(f"connection {self._hook.coranto_conn_id}: {error}") from error
                    await self._forget_client()
                    if problem != str(error):
                        problem = str(error)
                        self._log.warning(
                            "Journals %s/… cannot be queried: %s", self._group.name, with_connection_fields(problem)
                        )
                    pause = min(_MAX_PAUSE, pause * 2)
                else:
                    if problem:
                        self._log.info("Journals %s/… can be queried again", self._group.name)
                    pause, problem = self._interval, ""
                    self._log_missing(not positions)
                    yield positions
                await asyncio.sleep(pause)
        finally:
            await self._forget_client()

    async def _ask(self) -> dict[str, JournalPosition]:
        from coranto.client import JournalClient
        from coranto.client.positions import present_positions

        if self._client is None:
            config = (await self._hook.async_fields()).client_config()
            self._client = JournalClient.of(config)
        heads = await self._client.heads(self._group.selector)
        self._positions = now = present_positions(heads, self._positions)
        if self.before is not None:
            before = self.before(now)
            self.is_committed = self._commits is None or await self._commits.since(self._client, before, now)
        return now

    def _log_missing(self, is_missing: bool) -> None:
        """Log once that the group has no journals, and once that it has journals again."""
        if is_missing and not self._is_missing:
            self._log.warning(
                "Waits for a journal %s/… on the cluster of connection %s, which has none. Check the group's name, "
                "and whether the token may read it",
                self._group.name,
                self._hook.coranto_conn_id,
            )
        elif self._is_missing and not is_missing:
            self._log.info("Journals %s/… exist now", self._group.name)
        self._is_missing = is_missing

    async def _forget_client(self) -> None:
        """Close the client. The next client rereads the connection, which may have changed."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
