"""Sources of a client's messages, and sinks of the responses: a gRPC call, or a stand-in for one."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from coranto.errors import InvalidInput
from coranto_broker.rpc.content import ContentMessage

MessageT = TypeVar("MessageT")


class MessageSource(Protocol):
    """The source of a client's messages: a gRPC call, or a stand-in for one."""

    async def read(self) -> Any:
        """Return the next message, or at the end an object that is not a message."""


class SinkComplete(Exception):
    """A sink needs no further messages of the handler, which ends in order."""


class MessageSink(Protocol):
    """The receiver of a handler's messages. `write` returns once there is room for more, or raises SinkComplete."""

    async def write(self, message: Any, /) -> None: ...


class InstantSink(MessageSink, Protocol):
    """A sink that may take some messages without a wait."""

    @property
    def can_write_now(self) -> bool:
        """True if `write_now` may ever send something."""
        ...

    def write_now(self, message: Any, /) -> bool:
        """Send a message if that takes no wait. Returns False, and sends nothing, otherwise."""
        ...


class Unreadable:
    """Stands for received bytes that are not a message of the call, for a reason."""

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
    """Raise InvalidInput if `message` stands for bytes that could not be read."""
    if isinstance(message, Unreadable):
        raise InvalidInput(message.reason, field="message")
