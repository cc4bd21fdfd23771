"""Ends and restarts of brokers: graceful exits, broken stores, damaged disks, lost leases, recreated journals."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing

from coranto import labels
from coranto.coordination.allocator import AllocatorLoop
from coranto.coordination.lease import MemberSession, open_session
from coranto.effects import Clock, SystemClock
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker, stored_files

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]
Running = tuple[BrokerProcess, RawClient]


async def test_a_graceful_exit_stores_everything_and_the_next_broker_continues(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    async with running_broker(broker_settings) as (process, client):
        await create(client, spec(stores=("file:///frags/",)))
        await client.append(J, b"first", union_registers=labels.label_set(author="me"))
        await client.append(J, b"second")
        await process.exit_gracefully()
        refused = await client.append(J, b"too late")
        assert refused.status == pb.NO_JOURNAL_PRIMARY_BROKER
    ends = [fragment.end for fragment in stored_files(broker_settings).values()]
    assert ends == [5, 11]

    async with running_broker(broker_settings) as (_, client):
        response = await client.append_when_ready(J, b"third", check_registers=labels.parse_selector("author=me"))
        assert response.status == pb.OK
        assert response.commit.begin == 11
        assert response.registers == labels.label_set(author="me")
        assert await client.content(J) == b"firstsecondthird"


async def test_a_broken_store_does_not_delay_the_exit(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    impatient = broker_settings.model_copy(update={"exit_seconds": 1.0})
    async with running_broker(impatient) as (process, client):
        await create(client, spec(stores=("file:///frags/",)))
        await client.append(J, b"first")
        assert broker_settings.file_root is not None
        store = broker_settings.file_root / "frags"
        if store.exists():
            shutil.rmtree(store)
        store.write_text("not a folder any more")
        begun = asyncio.get_running_loop().time()
        await process.exit_gracefully()
        assert asyncio.get_running_loop().time() - begun < 30.0
    store.unlink()

    async with running_broker(broker_settings) as (_, client):
        response = await client.append_when_ready(J, b"second")
        assert response.commit.begin == 5
        assert await client.content(J) == b"firstsecond"
        await eventually(lambda: stored_files(broker_settings))


async def test_a_journal_of_the_same_name_begins_at_0(
    broker_settings: BrokerSettings, broker: Running, spec: MakeSpec
) -> None:
    _, client = broker
    await create(client, spec())
    await client.append(J, b"old content", union_registers=labels.label_set(author="old"))
    delete = pb.ApplyRequest.Change(delete=J, expect_mod_revision=-1)
    await client.stub.Apply(pb.ApplyRequest(changes=[delete]))
    spools = broker_settings.data_dir / "spools"
    await eventually(lambda: not [files for _, _, files in os.walk(spools) if files])
    await create(client, spec())
    response = await client.append(J, b"new")
    assert (response.commit.begin, len(response.registers.labels)) == (0, 0)
    assert await client.content(J) == b"new"


async def test_a_journal_recreated_while_no_broker_ran_begins_at_0(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    async with running_broker(broker_settings) as (_, client):
        await create(client, spec())
        await client.append(J, b"old content")
    other = broker_settings.model_copy(update={"id": "broker-1", "data_dir": broker_settings.data_dir / "other"})
    async with running_broker(other) as (process, client):
        await client.stub.Apply(pb.ApplyRequest(changes=[pb.ApplyRequest.Change(delete=J, expect_mod_revision=-1)]))
        await create(client, spec())
        await process.exit_gracefully()  # It has no content to wait for.
    async with running_broker(broker_settings) as (_, client):
        response = await client.append_when_ready(J, b"new")
        assert (response.status, response.commit.begin) == (pb.OK, 0)
        assert await client.content(J) == b"new"


async def test_content_in_the_store_beyond_our_head_needs_an_operator(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    assert broker_settings.file_root is not None
    content = b"written by others"
    stored = Fragment(J, 0, len(content), sum_of(content), Codec.NONE)
    path = broker_settings.file_root / "frags" / stored.content_path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    async with running_broker(broker_settings) as (_, client):
        await client.apply(spec(stores=("file:///frags/",)))
        refused = await client.append_when_ready(J, b"mine")
        validate(refused)
        assert refused.status == pb.INDEX_HAS_GREATER_OFFSET
        assert await client.content(J) == content
        (head,) = await client.read(J, -1)
        confirmed = await client.append(J, offset=head.write_head)
        assert (confirmed.status, confirmed.commit.begin) == (pb.OK, len(content))
        after = await client.append(J, b", then by me")
        assert (after.status, after.commit.begin) == (pb.OK, len(content))
        assert await client.content(J) == b"written by others, then by me"


async def test_a_damaged_spool_is_not_served_and_needs_an_operator(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    async with running_broker(broker_settings) as (_, client):
        await create(client, spec())
        await client.append(J, b"first")
        await client.append(J, b"second")
    (damaged,) = (broker_settings.data_dir / "spools").rglob(f"{5:016x}.content")
    damaged.write_bytes(b"secQnd")
    with structlog.testing.capture_logs() as logs:
        async with running_broker(broker_settings) as (_, client):
            refused = await client.append_when_ready(J, b"third")
            assert refused.status == pb.INDEX_HAS_GREATER_OFFSET
            assert await client.content(J) == b"first"
            (head,) = await client.read(J, -1)
            assert head.write_head == 11
            assert (await client.append(J, b"third", offset=11)).status == pb.INDEX_HAS_GREATER_OFFSET
            confirmed = await client.append(J, offset=11)
            assert (confirmed.status, confirmed.commit.begin) == (pb.OK, 11)
            assert (await client.append(J, b"third")).commit.begin == 11
            assert await client.content(J, 11) == b"third"
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["spool.corrupt"]


async def test_a_suspended_journal_is_woken_by_an_append(
    broker_settings: BrokerSettings, broker: Running, spec: MakeSpec
) -> None:
    _, client = broker
    await create(client, spec(stores=("file:///frags/",)))
    await client.append(J, b"content")
    suspended = await client.append(J, suspend=pb.AppendRequest.SUSPEND_NOW)
    assert suspended.status == pb.SUSPENDED
    await eventually(lambda: [each.end for each in stored_files(broker_settings).values()] == [7])
    (listing,) = await client.listing()
    assert listing.journals[0].spec.suspend == pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.PARTIAL, offset=7)
    assert await client.content(J) == b"content"
    woken = await client.append(J, b"!")
    assert (woken.status, woken.commit.begin) == (pb.OK, 7)
    (listing,) = await client.listing()
    assert listing.journals[0].spec.suspend.level == pb.JournalSpec.Suspend.NONE


class _Hasty(SystemClock):
    """A clock for sessions that check their lease often, however long it is."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.1))


async def test_a_broker_that_loses_its_lease_ends(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(*arguments: Any, clock: Clock, **more: Any) -> MemberSession:
        return await open_session(*arguments, clock=_Hasty(), **more)

    monkeypatch.setattr("coranto.member.membership.open_session", opened)
    async with running_broker(broker_settings) as (process, client):
        await create(client, spec())
        await process.broker.coordinator.lease_revoke(process.session.lease)
        assert await asyncio.wait_for(process.serve_until(asyncio.Event()), 60) == 1
        refused = await client.append(J, b"x")
        assert refused.status == pb.NO_JOURNAL_PRIMARY_BROKER


async def test_a_broker_whose_allocator_dies_ends(
    broker_settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(self: AllocatorLoop) -> None:
        raise ArithmeticError("planned to death")

    monkeypatch.setattr(AllocatorLoop, "run", die)
    async with BrokerProcess(broker_settings) as process:
        assert await asyncio.wait_for(process.serve_until(asyncio.Event()), 60) == 1


async def test_files_of_a_journal_that_moved_away_are_stored_and_removed(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto_broker.replication.replica.REFRESH_FOR_GAP_SECONDS", 0.3)
    other = broker_settings.model_copy(update={"id": "broker-1", "data_dir": broker_settings.data_dir / "other"})
    async with running_broker(broker_settings) as (process, client):
        await create(client, spec(stores=("file:///frags/",), fragment={"refresh_interval": 3600}))
        await client.append(J, b"content")
        async with running_broker(other) as (_, other_client):
            await process.broker.keyspace.wait_until(lambda state: len(state.members) == 2)
            exiting = asyncio.create_task(process.exit_gracefully())
            moved = await other_client.append_when_ready(J, b", and more")
            assert (moved.status, moved.commit.begin) == (pb.OK, 7)
            await exiting
            assert 7 in [fragment.end for fragment in stored_files(broker_settings).values()]
            spools = broker_settings.data_dir / "spools"
            assert not [path for path in spools.rglob("*.content") if path.stat().st_size]

            async def found_again() -> bool:
                return await other_client.content(J, 7) == b", and more"

            # The next listing of the stores is an hour away, but a reader at a gap triggers one earlier.
            await eventually(found_again)


async def test_a_broker_that_lost_contact_with_its_lease_leaves_it_to_the_next(broker_settings: BrokerSettings) -> None:
    # Found by simulation: the revocation of a lease that was still alive gave up the only replica of a journal.
    async with BrokerProcess(broker_settings) as process:
        process.session.lost.set()
        assert await process.serve_until(asyncio.Event()) == 1
    async with BrokerProcess(broker_settings) as following:
        assert following.session.resumed
