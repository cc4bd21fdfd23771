"""Message types of ingests: rows are checked against the type, and the schema of a source is registered as the type."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.errors import InvalidInput, JournalNotFound, PoisonRow
from coranto.ingest.source import Read
from coranto.labels import MESSAGE_TYPE, value_of
from coranto.testing import Cluster
from coranto.types.definitions import JsonForm, MessageType
from coranto.types.kinds import format_fields
from coranto.types.parsing import parse_fields
from coranto.types.registry import TypeRegistry
from tests.platform.ingest.lists import Lists, ingest, numbers, spec

REGISTRY = "types/registry"
FIELDS = parse_fields("split STRING, n INT NOT NULL")


def typed(**changes: Any) -> Any:
    return spec(type="shop.Order", registry=REGISTRY, **{"registers": True} | changes)


async def registered(client: JournalClient) -> list[str]:
    catalog = await TypeRegistry(client, REGISTRY).catalog()
    return [format_fields(each.definition.fields) for each in catalog.history("shop.Order")]


async def test_the_schema_of_a_source_becomes_the_type_of_the_stream(client: JournalClient) -> None:
    source = Lists({"a": [1, 2]}, schema=FIELDS)
    assert (await ingest(client, source, given=typed()).run()).rows == 2
    assert await registered(client) == ["split STRING, n INT NOT NULL"]
    journals = (await client.list("name:prefix=shop/orders/")).journals
    segments = [each for each in journals if "segment" in each.name or value_of(each.spec.labels, MESSAGE_TYPE)]
    assert {value_of(each.spec.labels, MESSAGE_TYPE) for each in segments} == {"shop.Order"}

    source.rows["a"].append(3)
    await ingest(client, source, given=typed()).run()
    assert len(await registered(client)) == 1
    source.rows["a"].append(4)
    source.schema = parse_fields("more DATE, n BIGINT NOT NULL, split STRING")
    await ingest(client, source, given=typed()).run()
    assert (await registered(client))[1:] == ["split STRING, n BIGINT NOT NULL, more DATE"]
    assert await numbers(client) == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]


async def test_a_source_without_rows_registers_no_schema(client: JournalClient) -> None:
    source = Lists({"a": [1]}, schema=())
    real = source.read

    async def read(max_bytes: int) -> Any:
        found = await real(max_bytes)
        source.schema = FIELDS if source.opened > 1 else ()
        return [Read("head", (), 1)] if source.opened == 1 and found else found

    source.read = read  # type: ignore[method-assign]
    await ingest(client, source, given=typed()).run()
    with pytest.raises(JournalNotFound):
        await registered(client)
    await ingest(client, source, given=typed()).run()
    assert await registered(client) == ["split STRING, n INT NOT NULL"]
    assert await numbers(client) == [("a", 1)]


async def test_fields_added_to_the_type_by_others_are_kept(client: JournalClient) -> None:
    await ingest(client, Lists({"a": [1]}, schema=FIELDS), given=typed()).run()
    theirs = MessageType("shop.Order", JsonForm(), parse_fields("split STRING, n INT, theirs STRING"))
    await TypeRegistry(client, REGISTRY).register(theirs)
    await ingest(client, Lists({"a": [1, 2]}, schema=FIELDS), given=typed()).run()
    assert (await registered(client))[1:] == ["split STRING, n INT, theirs STRING"]


async def test_two_processes_register_one_type(cluster: Cluster) -> None:
    runs = [ingest(cluster.client(), Lists({"a": [*range(50)]}, schema=FIELDS), given=typed()) for _ in range(2)]
    reports = await asyncio.gather(*(each.run() for each in runs))
    assert sum(each.rows for each in reports) == 50
    assert len(await registered(cluster.client())) == 1


async def test_an_incompatible_schema_ends_the_run_before_its_rows(client: JournalClient) -> None:
    await ingest(client, Lists({"a": [1]}, schema=FIELDS), given=typed()).run()
    source = Lists({"a": [1, 2]}, schema=parse_fields("split STRING, n STRING"))
    with pytest.raises(InvalidInput, match=r"the schema of lists cannot be registered as shop\.Order: .*n is INT, and"):
        await ingest(client, source, given=typed()).run()
    assert await numbers(client) == [("a", 1)]


async def test_a_type_that_is_not_registered_is_an_error_unless_the_ingest_registers_it(client: JournalClient) -> None:
    with pytest.raises(JournalNotFound, match="there is no such registry yet"):
        await ingest(client, Lists({"a": [1]}), given=typed(registers=False)).run()
    await ingest(client, Lists({"a": [1]}, schema=FIELDS), given=typed()).run()
    source = Lists({"a": [1, "poison"]}, schema=parse_fields("split STRING"))
    with pytest.raises(PoisonRow):
        await ingest(client, source, given=typed(registers=False)).run()
