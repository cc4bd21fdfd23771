"""Sources of a client's messages, and sinks of what it is sent: a gRPC call, or what stands for one."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from coranto.errors import InvalidInput
from coranto_broker.rpc.content import Content

MessageT = TypeVar("MessageT")


class Source(Protocol):
    """What a handler takes a client's messages from: a gRPC call, or what stands for one."""

    async def read(self) -> Any:
        """The next message; something else at the end."""


class Sink(Protocol):
    """What a handler sends its messages to. Returns once there is room for more."""

    async def write(self, message: Any, /) -> None: ...


class Unreadable:
    """What came in place of a message: bytes that are not its protobuf."""


async def next_message(context: Source, kind: type[MessageT]) -> MessageT | Content | None:
    """The next message of a client's stream, or None at its end. Raises InvalidInput for bytes that are no message."""
    message = await context.read()
    if isinstance(message, (Content, kind)):
        return message
    require_readable(message)
    return None


def require_readable(message: object) -> None:
    """Raises InvalidInput for what could not be read as a message."""
    if isinstance(message, Unreadable):
        raise InvalidInput("the message is not the protobuf of this call", field="message")
