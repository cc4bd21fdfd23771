"""Appends whose connection breaks between the message that asks to commit and the half-close."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.client.connection import Connection
from coranto.errors import AppendOutcomeUnknown, Outcome, Unavailable
from coranto.testing.fake_broker import FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb

NAME = "test/journal"


class _Call:
    """An append whose connection breaks before, or right after, it has sent that it may commit."""

    def __init__(self, call: Any, cut: Callable[[], None], *, after: bool) -> None:
        self._call = call
        self._cut = cut
        self._after = after

    async def write(self, message: pb.AppendRequest) -> None:
        await self._call.write(message)
        if message == pb.AppendRequest() if self._after else message.content:
            self._cut()
            await self._call.code()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, pb.AppendResponse]:
        response: Generator[Any, None, pb.AppendResponse] = self._call.__await__()
        return response


def _client(broker: FakeBroker, *, after: bool) -> JournalClient:
    class Breaking(Connection):
        @property
        def stub(self) -> Any:
            stub: Any = super().stub
            return SimpleNamespace(
                Append=lambda metadata: _Call(stub.Append(metadata=metadata), broker.cut, after=after)
            )

    return JournalClient(broker.endpoint, connect=Breaking)


async def test_after_the_message_that_asks_to_commit_nobody_knows(broker: FakeBroker, journal: FakeJournal) -> None:
    """A broker takes the end of its client for the end of the stream, or does not. This one does."""
    async with _client(broker, after=True) as client:
        with pytest.raises(AppendOutcomeUnknown) as caught:
            await client.append(NAME, b"content", retry_timeout=0)
    assert caught.value.outcome is Outcome.UNKNOWN


async def test_before_it_nothing_was_applied(broker: FakeBroker, journal: FakeJournal) -> None:
    async with _client(broker, after=False) as client:
        with pytest.raises(Unavailable) as caught:
            await client.append(NAME, b"content", retry_timeout=0)
    assert caught.value.outcome is Outcome.NOT_APPLIED
    assert journal.content == b""
