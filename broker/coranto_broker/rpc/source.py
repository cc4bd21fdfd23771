"""Interfaces between handlers and transports: sources of a client's messages, and sinks of the responses."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from coranto.errors import InvalidInput
from coranto_broker.rpc.content import ContentMessage

MessageT = TypeVar("MessageT")


class MessageSource(Protocol):
    """The source of a client's messages, such as the context of a gRPC call."""

    async def read(self) -> Any:
        """Return the next message. At the end, return an object that is not a message."""


class SinkComplete(Exception):
    """Raised by a sink that needs no further messages. The handler then ends normally."""


class MessageSink(Protocol):
    """The receiver of a handler's messages. `write` returns once there is room for more, or raises SinkComplete."""

    async def write(self, message: Any, /) -> None: ...


class InstantSink(MessageSink, Protocol):
    """A sink that can take some messages without waiting."""

    @property
    def can_write_now(self) -> bool:
        """True if `write_now` can ever send a message."""
        ...

    def write_now(self, message: Any, /) -> bool:
        """Send a message if that is possible without waiting. Otherwise return False, and send nothing."""
        ...


class Unreadable:
    """A placeholder for received bytes that are not a message of the call, with the reason."""

    def __init__(self, reason: str = "the message is not the protobuf of this call") -> None:
        self.reason = reason


async def next_message(context: MessageSource, kind: type[MessageT]) -> MessageT | ContentMessage | None:
    """Return the next message of a client's stream, or None at its end. Raises InvalidInput for unreadable bytes."""
    message = await context.read()
    if isinstance(message, (ContentMessage, kind)):
        return message
    require_readable(message)
    return None


def require_readable(message: object) -> None:
    """Raise InvalidInput if `message` is Unreadable."""
    if isinstance(message, Unreadable):
        raise InvalidInput(message.reason, field="message")
