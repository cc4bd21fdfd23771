"""Appends whose connection breaks between the commit message and the half-close."""

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
    """An append whose connection breaks before or right after the commit message."""

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


async def test_after_the_commit_message_the_outcome_is_unknown(broker: FakeBroker, journal: FakeJournal) -> None:
    """A broker may or may not take the client's disconnect for the end of the stream. This one does."""
    async with _client(broker, after=True) as client:
        with pytest.raises(AppendOutcomeUnknown) as caught:
            await client.append(NAME, b"content", retry_timeout=0)
    assert caught.value.outcome is Outcome.UNKNOWN


async def test_before_the_commit_message_nothing_is_applied(broker: FakeBroker, journal: FakeJournal) -> None:
    async with _client(broker, after=False) as client:
        with pytest.raises(Unavailable) as caught:
            await client.append(NAME, b"content", retry_timeout=0)
    assert caught.value.outcome is Outcome.NOT_APPLIED
    assert journal.content == b""
