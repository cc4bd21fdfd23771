"""Messages of a client's stream, its end, and invalid bytes."""

from __future__ import annotations

from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb
from coranto_broker.rpc.content import ContentMessage
from coranto_broker.rpc.source import Unreadable, next_message


class Stream:
    """Returns its messages, and at the end an object that is not a message."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else object()


async def test_messages_are_returned_in_order_until_the_end() -> None:
    content, request = ContentMessage(b"content"), pb.AppendRequest(journal="a/journal")
    stream = Stream(request, content)
    assert await next_message(stream, pb.AppendRequest) is request
    assert await next_message(stream, pb.AppendRequest) is content
    assert await next_message(stream, pb.AppendRequest) is None


async def test_bytes_that_are_not_a_message_are_refused() -> None:
    with pytest.raises(InvalidInput, match="not the protobuf of this call"):
        await next_message(Stream(Unreadable()), pb.AppendRequest)
