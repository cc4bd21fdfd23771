"""The check that a journal is forked between two messages, not within one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.messages.fixed_frame import frame_end
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.client import JournalClient


async def require_boundary(
    client: JournalClient, spec: pb.JournalSpec, fragments: Sequence[Fragment], begin: int, offset: int
) -> None:
    """Raise InvalidInput if a message of the journal continues at `offset`, by the journal's content type.

    `fragments` are the journal's, and `begin` is the first offset of the fork. Each fragment begins and ends between
    messages, because appends do. Content of an unknown type is not checked.
    """
    if offset == begin or any(offset in (each.begin, each.end) for each in fragments):
        return
    kind = labels.value_of(spec.labels, labels.CONTENT_TYPE)
    if kind in labels.LINE_TYPES:
        is_boundary = await client.read_all(spec.name, offset - 1, offset) == b"\n"
    elif kind == labels.FIXED_FRAMES:
        start = max((each.begin for each in fragments if each.begin < offset), default=begin)
        content = await client.read_all(spec.name, start, offset)
        at = 0
        while 0 <= at < len(content):
            at = frame_end(content, at)
        is_boundary = at == len(content)
    else:
        return
    if not is_boundary:
        raise InvalidInput(f"{offset} is within a message of {spec.name}: give the offset where one begins", field="at")
