"""Helpers for tests of brokers that write, and are refused or adopted."""

from __future__ import annotations

import pytest

from coranto.errors import WrongCluster
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import create

CONTENT = b"x" * 10_001
MINE = label_set(author="me")


async def write(child: BrokerChild, spec: pb.JournalSpec, content: bytes = CONTENT) -> None:
    """Have a broker acknowledge content. Only its spool has it, as its fragment is not full."""
    client = await child.client()
    await create(client, spec)
    response = await client.append(spec.name, content, union_registers=MINE)
    assert response.status == pb.OK
    await client.close()


async def refusal(settings: BrokerSettings, **other: object) -> str:
    """Return the error of a broker that does not start with these settings and `other` values."""
    with pytest.raises(WrongCluster) as refused:
        async with BrokerProcess(settings.model_copy(update=other)):
            raise AssertionError("it serves")
    return str(refused.value)
