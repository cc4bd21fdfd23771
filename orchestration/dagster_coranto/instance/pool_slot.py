"""Mutual exclusion of a consumer's steps, whether a sensor, automation, a backfill or a person launched their runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final

import dagster as dg

from dagster_coranto.instance.heartbeat import PRESUMED_DEAD_SECONDS, Heartbeat, last_heartbeat, process_is_gone

_POLL_SECONDS: Final = 1.0
_LOG_SECONDS: Final = 60.0


class PoolSlot:
    """A slot for a step in a Dagster pool: entering waits for a free slot, and leaving releases it.

    The pool gets a limit of one, unless it has another limit. So Dagster needs neither a sensor nor configuration, and
    the pool's page shows the active and the waiting runs. The run has a heartbeat while the step waits and works. The
    slot of a run that has ended, was killed or has no heartbeat is freed, because it would block all later runs. If
    such a run is still alive, the fence of its consumer prevents concurrent commits.

    A storage without pools gives every step a slot immediately. `log_wait` is called once a minute of waiting.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        run_id: str,
        pool: str,
        log_wait: Callable[[str], object],
        *,
        wait: Callable[[float], object] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._instance = instance
        self._run_id = run_id
        self._pool = pool
        self._step = pool  # Differs from the executor's step names, whose slots the executor frees itself.
        self._log_wait = log_wait
        self._wait = wait
        self._monotonic = monotonic
        self._wall = wall
        self._heartbeat = Heartbeat(self._instance, self._run_id)
        self._has_pools = self._instance.event_log_storage.supports_global_concurrency_limits

    def __enter__(self) -> PoolSlot:
        self._heartbeat.__enter__()
        try:
            if self._has_pools:
                self._await_slot()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._has_pools:
                self._instance.event_log_storage.free_concurrency_slot_for_step(self._run_id, self._step)
        finally:
            self._heartbeat.__exit__(kind, error, trace)

    def _ensure_limit(self) -> None:
        from sqlalchemy.exc import IntegrityError  # Imported here, so that loading definitions stays cheap.

        storage = self._instance.event_log_storage
        if not any(limit.name == self._pool and not limit.from_default for limit in storage.get_pool_limits()):
            with suppress(IntegrityError):  # Another run has just set it.
                storage.set_concurrency_slots(self._pool, 1)

    def _await_slot(self) -> None:
        self._ensure_limit()
        log_at = self._monotonic()
        while not self._claim():
            holders = self._holders()
            if self._monotonic() >= log_at:
                runs = ", ".join(sorted(holders)) or "none"
                self._log_wait(f"Waits for a slot in the pool {self._pool}. Runs with a slot: {runs}.")
                log_at = self._monotonic() + _LOG_SECONDS
            self._wait(_POLL_SECONDS)
            self._ensure_limit()

    def _claim(self) -> bool:
        """Claim a slot. On SQLite, two processes can claim the same slot; the second read shows its owner."""
        storage = self._instance.event_log_storage
        if not storage.claim_concurrency_slot(self._pool, self._run_id, self._step).is_claimed:
            return False
        return bool(storage.check_concurrency_claim(self._pool, self._run_id, self._step).is_claimed)

    def _holders(self) -> set[str]:
        """Return the runs that have a slot or were chosen for one. Frees the slots of runs that are over.

        Dagster chooses the next step when a slot becomes free, but misses a step that starts to wait at that moment. So
        a step that sees neither holders nor chosen steps queues again.
        """
        storage = self._instance.event_log_storage
        info = storage.get_concurrency_info(self._pool)
        chosen = [each for each in info.pending_steps if each.assigned_timestamp is not None]
        found = {(each.run_id, each.step_key) for each in info.claimed_slots}
        found |= {(each.run_id, each.step_key) for each in chosen}
        over = {each for each in found if each[0] != self._run_id and self._is_over(each[0])}
        for run_id, step_key in over:
            storage.free_concurrency_slot_for_step(run_id, step_key)
        if not found:
            storage.free_concurrency_slot_for_step(self._run_id, self._step)
        return {run_id for run_id, _ in found - over}

    def _is_over(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished or process_is_gone(run):
            return True
        alive = last_heartbeat(run)
        return alive is not None and self._wall() - alive > PRESUMED_DEAD_SECONDS
