"""A process's liveness: the lease of its member key and assignments.

A session keeps its lease alive. When the process dies, the lease expires, and etcd deletes the member and all its
assignments together. Leases are the only failure detector.

A process that was killed and restarts before that may *resume*: it finds its lease's id in a file of its data
directory, keeps that lease alive again, and has its membership and assignments as if nothing had happened. Only one
process may do so: a caller that passes a `LeaseRecord` must hold that directory exclusively (see
`coranto.process.dirlock`). A lock on a copy of the directory is not enough: it says nothing about the process that uses
the original. So the file names its directory (`coranto.process.dirlock.directory_id`), and only a process that finds
the file there resumes. Any other process waits until the lease has expired.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from coranto.coordination.etcd import Coordinator, GrantedLease, KeyValue, Put, absent, unmodified
from coranto.effects import Clock, Disk, LocalDisk, SystemClock
from coranto.errors import LeaseLost, MemberInUse, TxnOutcomeUnknown, Unavailable
from coranto.process.dirlock import directory_id

_log = structlog.get_logger(__name__)

LEASE_FILE = "lease.json"
"""The record's file name in a process's data directory."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The file that records a lease: its id, and the etcd cluster that granted it.

    `place` names the directory of the file; empty for a directory that cannot be copied.
    """

    path: Path
    disk: Disk
    place: str = ""

    @staticmethod
    def within(data_dir: Path, disk: Disk | None = None) -> LeaseRecord:
        """Return the record of a data directory. If `disk` is this machine's own, an absent directory is created."""
        disk = disk if disk is not None else LocalDisk()
        place = directory_id(data_dir) if isinstance(disk, LocalDisk) else ""
        return LeaseRecord(data_dir / LEASE_FILE, disk, place)

    def load(self) -> tuple[int, int] | None:
        """Return (cluster id, lease id); None if there is no readable record."""
        found = self._read()
        return found[:2] if found is not None else None

    def resumable(self) -> tuple[int, int] | None:
        """Return the record of `load`; None if it was written in another directory and copied to this one."""
        found = self._read()
        return found[:2] if found is not None and found[2] == self.place else None

    def save(self, cluster_id: int, lease: int) -> None:
        document = {"cluster_id": cluster_id, "lease": lease, "place": self.place}
        self.disk.write_atomic(self.path, json.dumps(document).encode())

    def _read(self) -> tuple[int, int, str] | None:
        try:
            content = json.loads(self.disk.read(self.path))
            return int(content["cluster_id"]), int(content["lease"]), str(content.get("place", ""))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("lease.bad_record", path=str(self.path), error=str(error))
            return None

    def clear(self) -> None:
        self.disk.remove(self.path)


class MemberSession:
    """A lease that is kept alive, and the member key announced under it. Create it with `open_session`.

    `lost` is set when the lease is gone, or when this process cannot rule that out. Serve nothing from then on.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        lease: GrantedLease,
        *,
        alive_until: float,
        resumed: bool,
        record: LeaseRecord | None,
        clock: Clock,
    ) -> None:
        self.lease = lease.id
        self.ttl_seconds = lease.ttl_seconds
        self.resumed = resumed
        self.lost = asyncio.Event()
        self.key = ""
        self.revision = 0
        self._coordinator = coordinator
        self._record = record
        self._clock = clock
        self._alive_until = alive_until
        self._renewed = asyncio.Event()
        self._doubted = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep_alive(), name="lease.keep_alive")

    async def announce(self, key: str, value: bytes, *, takeover_timeout: float | None = None) -> int:
        """Put the member key under the lease, and return the key's revision.

        A key that a resumed lease already holds keeps its age (create revision) and gets the new value. It is written
        even if it has that value, so that all watchers see a revision after this call began. If another lease holds the
        key, this waits until the key is deleted: its process closes or its lease expires. Raises
        LeaseLost, and MemberInUse when that lease is still alive after its time to live and `takeover_timeout` seconds.
        If cancelled, the key may or may not have been written.
        """
        while True:
            try:
                revision = await self._unless_lost(self._announce_once(key, value, takeover_timeout))
            except (TxnOutcomeUnknown, Unavailable) as error:
                _log.warning("member.announce_again", key=key, error=str(error))
                await self._unless_lost(self._clock.sleep(0.2))
                continue
            if revision:
                self.key, self.revision = key, revision
                return revision

    async def update(self, value: bytes) -> int:
        """Replace the announced value, for example to mark the member as exiting. Return the revision.

        Raises LeaseLost when the key is no longer under this session's lease. If cancelled, the value may or may not
        have been replaced.
        """
        if not self.key:
            raise LeaseLost("nothing is announced under this lease yet; announce() the member first")
        while True:
            try:
                _, kv = await self._unless_lost(self._coordinator.get(self.key))
                if kv is None or kv.lease != self.lease:
                    raise LeaseLost(
                        f"member key {self.key} is no longer under this process's lease; stop serving, "
                        "and start the process again"
                    )
                revision = await self._unless_lost(self._overwrite(kv, value))
            except (TxnOutcomeUnknown, Unavailable) as error:
                _log.warning("member.update_again", key=self.key, error=str(error))
                await self._unless_lost(self._clock.sleep(0.2))
                continue
            if revision:
                self.revision = revision
                return revision

    async def confirmed(self) -> None:
        """Return once the lease is certain to be alive, usually immediately. Raises LeaseLost when it is gone.

        It is in doubt after this process was suspended, or did not reach etcd. Others may have continued without this
        member. So work that requires membership waits here, instead of taking effect just before
        `lost` is noticed. Cancelling ends only the wait.
        """
        while self._clock.monotonic() >= self._alive_until:
            self._doubted.set()
            self._renewed.clear()
            await self._unless_lost(self._renewed.wait())

    async def close(self, *, revoke: bool = True) -> None:
        """Stop keeping the lease alive, and revoke it: etcd deletes the member and its assignments immediately.

        With `revoke=False` they stay until the lease expires, so that a successor with the same record can resume it.
        If the call is cancelled, the lease may last until it expires.
        """
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if not revoke:
            return
        try:
            await self._coordinator.lease_revoke(self.lease)
        except Unavailable as error:
            _log.warning("lease.revoke_failed", error=str(error), expires_within_seconds=self.ttl_seconds)
            return  # The record stays, so that a restart finds its own lease instead of waiting for its expiry.
        if self._record is not None:
            self._record.clear()

    async def _announce_once(self, key: str, value: bytes, takeover_timeout: float | None) -> int:
        """Return the revision of the announced key, or 0 to try again."""
        result = await self._coordinator.txn([absent(key)], [Put(key, value, lease=self.lease)], otherwise=[key])
        if result.succeeded:
            return result.header.revision
        found = result.found[0]
        if found is None:
            return 0
        if found.lease == self.lease:
            return await self._overwrite(found, value, anyway=True)
        _log.warning("member.waiting_for_old_lease", key=key, lease=found.lease)
        if takeover_timeout is None:
            await self._deleted(found)
            return 0
        granted = (await self._coordinator.lease_status(found.lease)).granted
        waiting = asyncio.ensure_future(self._deleted(found))
        giving_up = asyncio.ensure_future(self._clock.sleep(granted + takeover_timeout))
        try:
            await asyncio.wait((waiting, giving_up), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
                return 0
        finally:
            waiting.cancel()
            giving_up.cancel()
            await asyncio.gather(waiting, giving_up, return_exceptions=True)
        raise MemberInUse(
            f"another process is alive as {key.rpartition('/')[2]}: its lease {found.lease:#x} has been kept alive for "
            f"{granted + takeover_timeout:g} s. Stop it, or give this one another name and an empty data directory. If "
            "this data directory is a copy of that process's, never start both"
        )

    async def _deleted(self, kv: KeyValue) -> None:
        """Wait until a key is deleted."""
        async with aclosing(self._coordinator.watch(kv.key, kv.mod_revision + 1)) as batches:
            async for batch in batches:
                if any(event.deleted and event.kv.key == kv.key for event in batch.events):
                    return

    async def _overwrite(self, kv: KeyValue, value: bytes, *, anyway: bool = False) -> int:
        """Write `value` to a key, and return its revision, or 0 to try again. `anyway` also writes an equal value."""
        if kv.value == value and not anyway:
            return kv.mod_revision
        result = await self._coordinator.txn([unmodified(kv)], [Put(kv.key, value, keep_lease=True)])
        return result.header.revision if result.succeeded else 0

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Cancel it and raise LeaseLost if the lease is lost first."""
        working = asyncio.ensure_future(work)
        losing = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise LeaseLost(f"lease {self.lease:#x} ran out; stop serving, and start the process again")
        finally:
            losing.cancel()
            working.cancel()
            await asyncio.gather(working, losing, return_exceptions=True)

    async def _keep_alive(self) -> None:
        """Refresh the lease three times per time to live; after a failure, more often until that time is over."""
        pause = self.ttl_seconds / 3
        while True:
            await self._pause(pause)
            sent = self._clock.monotonic()
            try:
                # Try even after a pause beyond the time to live: if etcd has kept the lease, nothing is lost.
                async with asyncio.timeout(max(min(1.0, self.ttl_seconds / 3), self._alive_until - sent)):
                    remaining = await self._coordinator.lease_keepalive(self.lease)
            except (Unavailable, TimeoutError) as error:
                if self._clock.monotonic() >= self._alive_until:
                    self._lose(f"etcd could not be reached for {self.ttl_seconds} seconds: {error}")
                    return
                _log.warning("lease.keepalive_failed", error=str(error) or "timed out")
                pause = min(self.ttl_seconds / 10, max(0.0, self._alive_until - self._clock.monotonic()))
                continue
            except Exception as error:  # noqa: BLE001  Whatever it is, the lease is no longer kept alive.
                _log.exception("lease.keepalive_failed")
                self._lose(repr(error))
                return
            if remaining == 0:
                self._lose("etcd says that it is gone")
                return
            self._alive_until = sent + remaining
            self._renewed.set()
            pause = self.ttl_seconds / 3

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the lease is in doubt.

        The event loop's clock stops while the machine sleeps, so the wait may last longer.
        """
        waits = [asyncio.ensure_future(self._clock.sleep(seconds)), asyncio.ensure_future(self._doubted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._doubted.clear()
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _lose(self, reason: str) -> None:
        _log.error("lease.lost", lease=self.lease, key=self.key, reason=reason)
        self.lost.set()


async def open_session(
    coordinator: Coordinator,
    *,
    ttl_seconds: float,
    record: LeaseRecord | None = None,
    clock: Clock | None = None,
) -> MemberSession:
    """Open a session on the lease of `record` if it is still alive, else on a new lease of `ttl_seconds`.

    The lease's id is recorded before this returns. Raises Unavailable when etcd does not answer. A new lease of
    a cancelled call expires.
    """
    clock = clock if clock is not None else SystemClock()
    header, _ = await coordinator.get("/")
    remembered = record.resumable() if record is not None else None
    if record is not None and remembered is None and record.load() is not None:
        _log.warning("lease.of_another_directory", path=str(record.path), place=record.place)
    if remembered is not None and remembered[0] == header.cluster_id:
        began = clock.monotonic()
        remaining = await coordinator.lease_keepalive(remembered[1])
        if remaining:
            _log.info("lease.resumed", lease=remembered[1], ttl_seconds=remaining)
            # A keep-alive resets the lease to its full granted time.
            return MemberSession(
                coordinator,
                GrantedLease(remembered[1], remaining),
                alive_until=began + remaining,
                resumed=True,
                record=record,
                clock=clock,
            )
    began = clock.monotonic()
    lease = await coordinator.lease_grant(max(1, math.ceil(ttl_seconds)))
    if record is not None:
        record.save(header.cluster_id, lease.id)
    return MemberSession(
        coordinator, lease, alive_until=began + lease.ttl_seconds, resumed=False, record=record, clock=clock
    )
