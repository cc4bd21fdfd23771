"""The capabilities that readers and registrants of a registry of message types need."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable

import pytest
from pydantic import SecretStr

from coranto.client import JournalClient
from coranto.errors import JournalNotFound, PermissionDenied
from coranto.labels import NAME, label_selector
from coranto.security.tokens import BearerToken, Capability, Keys, Secret, claims_for, sign
from coranto.types import JsonForm, MessageType, TypeRegistry, parse_fields
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings

KEY = base64.b64encode(b"k" * 32).decode()
REGISTRY = "types/registry"
READ, LIST, APPEND = Capability.READ, Capability.LIST, Capability.APPEND


def order(fields: str) -> MessageType:
    return MessageType("shop.Order", JsonForm(), parse_fields(fields))


async def test_readers_only_read_and_registrants_also_list_and_append(
    broker_settings: BrokerSettings, spec: Callable[..., pb.JournalSpec]
) -> None:
    keys = Keys.parse(KEY)

    clients = contextlib.AsyncExitStack()

    async def registry(capability: Capability, journal: str = REGISTRY) -> TypeRegistry:
        claims = claims_for(capability, label_selector(include=[(NAME, journal)]), time.time(), 600)
        client = JournalClient(process.endpoint, auth=BearerToken(Secret(sign(claims, keys))))
        return TypeRegistry(await clients.enter_async_context(client), REGISTRY)

    settings = broker_settings.model_copy(update={"auth_keys": SecretStr(KEY), "http_port": 0})
    async with BrokerProcess(settings) as process, clients:
        async with JournalClient(process.endpoint, auth=keys) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec("shop/orders"))])
            await TypeRegistry(client, REGISTRY).register(order("id INT"), like="shop/orders")

        assert (await (await registry(READ)).find("shop.Order")).number == 1
        for missing in (READ, LIST, APPEND):
            lacking = await registry((READ | LIST | APPEND) & ~missing)
            with pytest.raises(PermissionDenied, match=missing.name):
                await lacking.register(order("id BIGINT"))
        done = await (await registry(READ | LIST | APPEND)).register(order("id BIGINT"))
        assert str(done.version) == "shop.Order@2"

        hidden = await registry(Capability.ALL, "others")
        for asked in (hidden.find("shop.Order"), hidden.register(order("id BIGINT, x INT"))):
            with pytest.raises(JournalNotFound, match="no such registry yet, or your token does not cover it"):
                await asked
