"""Failures of calls to a broker, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from tests.broker.running import RawClient

MakeSpec = Callable[..., pb.JournalSpec]
Running = tuple[BrokerProcess, RawClient]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The gRPC error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
