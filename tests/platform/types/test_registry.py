"""Registries on real brokers: concurrent registrations, lost answers, and damaged or missing registries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from coranto import labels
from coranto.client import AppendResult, Chunk, JournalClient, SyncJournalClient
from coranto.effects import SystemClock
from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptData,
    IncompatibleType,
    InvalidInput,
    JournalNotFound,
    MessageTypeNotFound,
    NotAllowed,
    OffsetJump,
    TornAppend,
)
from coranto.labels import label_set
from coranto.testing import Cluster
from coranto.testing.sync_cluster import SyncCluster
from coranto.types import Compatibility, CsvForm, JsonForm, MessageType, SyncTypeRegistry, TypeRegistry, parse_fields
from coranto.wire import protocol_pb2 as pb

LIKE = "shop/orders"


def order(fields: str, name: str = "shop.Order") -> MessageType:
    return MessageType(name, JsonForm(), parse_fields(fields))


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(brokers=2, grpc=True) as cluster:
        await cluster.create(LIKE)
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> JournalClient:
    return cluster.client()


@pytest.fixture
def name() -> str:
    return f"types/{os.urandom(4).hex()}"


async def test_a_registry_is_created_once_and_read_by_all(cluster: Cluster, client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    for request in (registry.register(order("id INT")), registry.find("shop.Order"), registry.catalog()):
        with pytest.raises(JournalNotFound, match="there is no such registry yet, or your token does not cover it"):
            await request
    first = await registry.register(order("id INT"), like=LIKE)
    again = await registry.register(order("id INT"), like=LIKE)
    second = await registry.register(order("id BIGINT, at TIMESTAMP"))

    assert (first.is_new, again.is_new, second.is_new) == (True, False, True)
    assert again.version == first.version
    other = TypeRegistry(cluster.client(), name)
    assert str(await other.find("shop.Order")) == "shop.Order@2"
    assert (await other.find("shop.Order@1")) == first.version
    with pytest.raises(MessageTypeNotFound):
        await other.find("shop.Else")
    [info] = (await client.list(f"name={name}")).journals
    assert labels.value_of(info.spec.labels, labels.MANAGED_BY) == labels.MESSAGE_TYPES
    assert labels.value_of(info.spec.labels, labels.CONTENT_TYPE) == labels.JSON_LINES


async def test_a_version_that_breaks_readers_is_refused_and_adds_nothing(client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)
    head = await client.head(name)
    [problem] = await registry.problems(order("id STRING"))
    assert str(problem).startswith("id is STRING in the new version, which does not hold INT of version 1: keep INT")
    with pytest.raises(IncompatibleType, match="id is STRING"):
        await registry.register(order("id STRING"))
    assert await client.head(name) == head
    assert await registry.problems(order("id INT")) == ()
    assert await registry.problems(order("id STRING"), compatibility=Compatibility.NONE) == ()
    done = await registry.register(order("id STRING"), compatibility=Compatibility.NONE)
    assert str(done.version) == "shop.Order@2"


async def test_each_of_several_concurrent_registrations_sees_the_earlier_ones(cluster: Cluster, name: str) -> None:
    """Some definitions are compatible with each other, others are not. The versions stay compatible in any order."""
    fields = [*(f"id INT, f{n} STRING" for n in range(6)), "id INT, g STRING", "id INT, g DATE", "id INT, g BOOLEAN"]
    registries = [TypeRegistry(cluster.client(), name) for _ in fields]
    done = await asyncio.gather(
        *(each.register(order(text), like=LIKE) for each, text in zip(registries, fields, strict=True)),
        return_exceptions=True,
    )

    refused = [each for each in done if isinstance(each, BaseException)]
    assert len(refused) == 2
    assert all(isinstance(each, IncompatibleType) for each in refused)
    catalog = await TypeRegistry(cluster.client(), name).catalog()
    versions = catalog.history("shop.Order")
    assert [each.number for each in versions] == [*range(1, 8)]
    assert catalog.strays == []
    expected = {each.version.number: each.version for each in done if not isinstance(each, BaseException)}
    assert expected == {each.number: each for each in versions}


async def test_concurrent_registrations_of_a_definition_register_it_once(cluster: Cluster, name: str) -> None:
    registries = [TypeRegistry(cluster.client(), name) for _ in range(8)]
    done = await asyncio.gather(*(each.register(order("id INT"), like=LIKE) for each in registries))
    assert [each.is_new for each in done].count(True) == 1
    assert {each.version for each in done} == {done[0].version}
    assert len((await registries[0].catalog()).history("shop.Order")) == 1


async def test_tasks_may_share_a_registry(client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)
    shared = TypeRegistry(client, name)
    added = [shared.register(order(f"id INT, f{number} STRING")) for number in range(4)]
    found = await asyncio.gather(*added, *(shared.find("shop.Order@1") for _ in range(8)), shared.catalog())
    assert {str(each.version) for each in found[:4]} == {f"shop.Order@{number}" for number in range(2, 6)}
    catalog = await shared.catalog()
    assert (len(catalog.history("shop.Order")), catalog.strays) == (5, [])


class FixedClock(SystemClock):
    """A clock whose wall time is fixed."""

    def __init__(self, time: float) -> None:
        self.time = time

    def now(self) -> float:
        return self.time


class AnswerLosingClient(JournalClient):
    """A client that loses the answers to a number of appends with content, which were applied or not."""

    times = 0
    applied = True

    async def append(self, journal: str, content: object, **options: object) -> AppendResult:  # type: ignore[override]
        if content and self.times:
            self.times -= 1
            if self.applied:
                await super().append(journal, content, **options)  # type: ignore[arg-type]
            raise AppendOutcomeUnknown("the answer was lost")
        return await super().append(journal, content, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("applied", [False, True])
async def test_lost_answers_register_nothing_twice(cluster: Cluster, name: str, applied: bool) -> None:
    async with AnswerLosingClient.of(cluster.client().config) as losing_answers:
        assert isinstance(losing_answers, AnswerLosingClient)
        losing_answers.applied = applied
        for number, text in enumerate(("id INT", "id BIGINT"), 1):
            losing_answers.times = 1
            registry = TypeRegistry(losing_answers, name)
            done = await registry.register(order(text), like=LIKE)
            assert (done.version.number, done.is_new) == (number, True)
            assert len((await registry.catalog()).history("shop.Order")) == number
            assert (await registry.catalog()).strays == []
        losing_answers.times = 2
        if not applied:
            with pytest.raises(AppendOutcomeUnknown):
                await TypeRegistry(losing_answers, name).register(order("id BIGINT, x INT"))


async def test_strays_are_skipped_and_a_later_format_ends_reads(client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)
    await client.append(name, b"hello\n")
    assert (await registry.register(order("id BIGINT"))).version.number == 2
    assert [each.problem for each in (await registry.catalog()).strays] == ["not JSON"]
    await client.append(name, b'{"registry": 2}\n')
    for each in (registry, TypeRegistry(client, name)):
        for _ in range(2):  # A retry fails, too.
            with pytest.raises(CorruptData, match="use a later version of Coranto"):
                await each.find("shop.Order")
        with pytest.raises(CorruptData, match="use a later version of Coranto"):
            await each.register(order("id BIGINT, x INT"))


async def test_a_registry_that_ends_within_a_record_is_damaged(client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)
    with pytest.raises(TornAppend):
        await client.append(name, b'{"registry": 1')
    [info] = (await client.list(f"name={name}")).journals
    info.spec.labels.CopyFrom(labels.with_value(info.spec.labels, labels.LINES, labels.ANY))
    await client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
    await client.append(name, b'{"registry": 1')
    with pytest.raises(CorruptData, match="within a record"):
        await registry.find("shop.Order")


async def test_lost_registers_are_refused_until_the_loss_is_accepted(client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)
    await client.append(name, b"\n", subtract_registers=label_set({labels.HELD: "true"}))
    with pytest.raises(CorruptData, match="not the registers of a registry"):
        await registry.register(order("id BIGINT"))
    assert (await registry.find("shop.Order")).number == 1
    assert (await registry.register(order("id BIGINT"), accept_loss=True)).version.number == 2
    assert (await registry.register(order("id BIGINT, x INT"))).version.number == 3


async def test_a_journal_with_other_content_is_not_a_registry(client: JournalClient) -> None:
    await client.append(LIKE, b'{"id": 1}\n')
    with pytest.raises(CorruptData, match="it is not one"):
        await TypeRegistry(client, LIKE).register(order("id INT"))


async def test_a_recreated_registry_is_detected(cluster: Cluster, client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)
    [info] = (await client.list(f"name={name}")).journals
    await client.apply([pb.ApplyRequest.Change(delete=name, expect_mod_revision=info.mod_revision)])
    await cluster.create(name)
    with pytest.raises(CorruptData, match="deleted and created again"):
        await registry.find("shop.Order")


@pytest.mark.parametrize("fields", [["id INT"], ["id DATE, name STRING", "id DATE, name STRING, x INT"]])
async def test_a_recreated_registry_is_detected_at_any_length(
    cluster: Cluster, client: JournalClient, name: str, fields: list[str]
) -> None:
    """Otherwise old versions and new records would mix, and registered versions would be skipped by other readers."""
    earlier, later = FixedClock(1.7e9), FixedClock(1.8e9)  # The first records get the same length.
    reader, registrant = TypeRegistry(client, name), TypeRegistry(client, name, clock=earlier)
    await registrant.register(order("id INT"), like=LIKE)
    await reader.find("shop.Order")
    [info] = (await client.list(f"name={name}")).journals
    await client.apply([pb.ApplyRequest.Change(delete=name, expect_mod_revision=info.mod_revision)])
    other = TypeRegistry(cluster.client(), name, clock=later)
    for each in fields:
        await other.register(order(each), like=LIKE)
    for request in (reader.find("shop.Order"), registrant.register(order("id BIGINT"))):
        with pytest.raises(CorruptData, match="has other records there now: it was deleted and created again"):
            await request
    assert (await TypeRegistry(client, name).find("shop.Order")).number == len(fields)


async def test_earlier_readers_see_later_versions(cluster: Cluster, client: JournalClient, name: str) -> None:
    """A reader keeps the version that it has, and a registrant with an old catalog gets the next number."""
    old = TypeRegistry(client, name)
    first = await old.register(order("id INT"), like=LIKE)
    other = TypeRegistry(cluster.client(), name)
    await other.register(order("id BIGINT"))
    await other.register(order("id BIGINT, at TIMESTAMP"))
    assert str(first.version) == "shop.Order@1"
    with pytest.raises(IncompatibleType, match="does not hold BIGINT of version 3"):
        await old.register(order("id INT, n INT"))
    assert (await old.register(order("id BIGINT, n INT"))).version.number == 4
    assert str(await other.find("shop.Order")) == "shop.Order@4"
    assert await other.find("shop.Order@1") == first.version


async def test_a_definition_of_a_mebibyte_is_registered_and_a_larger_one_refused(
    client: JournalClient, name: str
) -> None:
    wide = MessageType("wide.Row", JsonForm(), parse_fields(", ".join(f"f{n:05}{'x' * 95} INT" for n in range(9700))))
    registry = TypeRegistry(client, name)
    await registry.register(wide, like=LIKE)
    assert await client.head(name) > 1_000_000
    assert (await TypeRegistry(client, name).find("wide.Row")).definition == wide
    with pytest.raises(InvalidInput, match=r"the record of wide\.Row has 5.* bytes, and may have 4194304"):
        await registry.register(MessageType("wide.Row", JsonForm(), wide.fields, "x" * (4 << 20)))
    assert (await registry.find("wide.Row")).number == 1


class JumpingClient(JournalClient):
    """A client of brokers that skip missing content, as they do hours after its removal."""

    async def read(self, journal: str, offset: int = 0, **options: object) -> AsyncIterator[Chunk]:  # type: ignore[override]
        assert options["fail_on_jump"]
        raise OffsetJump(journal, offset, offset + 120)
        yield Chunk(offset, b"", offset)


async def test_a_registry_that_has_lost_records_is_damaged(cluster: Cluster, client: JournalClient, name: str) -> None:
    await TypeRegistry(client, name).register(order("id INT"), like=LIKE)
    async with JumpingClient.of(cluster.client().config) as jumping:
        with pytest.raises(CorruptData, match=f"registry {name} has lost records: .*begin a new registry"):
            await TypeRegistry(jumping, name).find("shop.Order")


async def test_a_registry_may_be_read_only_or_suspended(client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)

    async def change(flags: pb.JournalSpec.Flag.ValueType, level: pb.JournalSpec.Suspend.Level.ValueType) -> None:
        [info] = (await client.list(f"name={name}")).journals
        info.spec.flags = flags
        offset = await client.head(name) if level else 0
        info.spec.suspend.CopyFrom(pb.JournalSpec.Suspend(level=level, offset=offset))
        await client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])

    await change(pb.JournalSpec.O_RDONLY, pb.JournalSpec.Suspend.NONE)
    for reader in (registry, TypeRegistry(client, name)):
        assert (await reader.find("shop.Order")).number == 1
    with pytest.raises(NotAllowed):
        await registry.register(order("id BIGINT"))
    await change(pb.JournalSpec.O_WRONLY, pb.JournalSpec.Suspend.NONE)
    with pytest.raises(NotAllowed):
        await registry.find("shop.Order")
    await change(pb.JournalSpec.O_RDWR, pb.JournalSpec.Suspend.NONE)
    await change(pb.JournalSpec.O_RDWR, pb.JournalSpec.Suspend.PARTIAL)
    for reader in (registry, TypeRegistry(client, name)):
        assert (await reader.find("shop.Order")).number == 1
    assert (await registry.register(order("id BIGINT"))).version.number == 2


async def test_journals_with_a_retention_or_other_content_are_not_registries(
    cluster: Cluster, client: JournalClient, name: str
) -> None:
    await cluster.create(name, labels={labels.CONTENT_TYPE: labels.CSV})
    with pytest.raises(InvalidInput, match="has content-type text/csv, and a registry has lines of JSON"):
        await TypeRegistry(client, name).register(order("id INT"))
    [info] = (await client.list(f"name={name}")).journals
    info.spec.labels.Clear()
    info.spec.fragment.retention.FromSeconds(3600)
    await client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
    with pytest.raises(InvalidInput, match="has a retention"):
        await TypeRegistry(client, name).register(order("id INT"))


async def test_the_type_of_journals_is_found_by_labels(cluster: Cluster, client: JournalClient, name: str) -> None:
    expected = {labels.CONTENT_TYPE: labels.JSON_LINES, labels.MESSAGE_TYPE: "shop.Order"}
    for part in ("a/orders/one", "a/orders/two"):
        await cluster.create(part, labels=expected)
    await cluster.create("a/others/one", labels={labels.CONTENT_TYPE: labels.CSV})
    registry = TypeRegistry(client, name)
    await registry.register(order("id INT"), like=LIKE)

    orders = (await client.list("name:prefix=a/orders/")).journals
    assert str(await registry.find_for(orders)) == "shop.Order@1"
    everything = (await client.list("name:prefix=a/")).journals
    with pytest.raises(InvalidInput, match=r"none: a/others/one; shop\.Order: a/orders/one, a/orders/two"):
        await registry.find_for(everything)
    with pytest.raises(InvalidInput, match="journal a/others/one has content-type text/csv"):
        await registry.find_for(everything, "shop.Order@1")


def test_the_blocking_registry_has_the_same_methods() -> None:
    with SyncCluster(brokers=1) as cluster:
        cluster.create(LIKE)
        client: SyncJournalClient = cluster.client()
        with SyncTypeRegistry(client, "types/registry") as registry:
            assert registry.register(order("id INT"), like=LIKE).is_new
            assert registry.find("shop.Order").definition == order("id INT")
            assert registry.catalog().names == ("shop.Order",)


async def test_extending_a_type_keeps_the_fields_of_all(cluster: Cluster, client: JournalClient, name: str) -> None:
    registry = TypeRegistry(client, name)
    first = await registry.extend(order("id INT NOT NULL"), like=LIKE)
    assert (first.is_new, first.version.number) == (True, 1)
    # Each adds another field, so a field registered between a read and an append must not be dropped.
    names = [f"field_{number}" for number in range(6)]
    await asyncio.gather(*(TypeRegistry(cluster.client(), name).extend(order(f"id BIGINT, {n} INT")) for n in names))
    latest = (await registry.find("shop.Order")).definition
    assert {field.name for field in latest.fields} == {"id", *names}
    same = await registry.extend(order("id INT, field_3 INT"))
    assert (same.is_new, same.version.number) == (False, 7)
    with pytest.raises(InvalidInput, match="id is BIGINT, and STRING, and no type holds both"):
        await registry.extend(order("id STRING"))
    with pytest.raises(InvalidInput, match="registered for messages of framing json, and these are of csv"):
        await registry.extend(MessageType("shop.Order", CsvForm(), parse_fields("id INT")))
    assert (await registry.find("shop.Order")).number == 7
