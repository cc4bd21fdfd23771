"""Hints: the files of a history that are alive at one point of it, and the segments of logs that hold their operations.

A player uses hints to skip dead content, and to choose the right history when several authors wrote. As in Gazette,
hints are stored in etcd as JSON (see `coranto_consumers.recoverylog.hint_store`). Serialized protobuf messages
can be read, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from coranto.errors import CorruptData, InvalidInput
from coranto.wire import recoverylog_pb2 as wire
from coranto_consumers.recoverylog.operations import Author, Fnode, SetProperty
from coranto_consumers.recoverylog.segments import LogSegment, SegmentSet


@dataclass(frozen=True, slots=True)
class LiveFnode:
    """A live file, and the segments that hold all of its operations."""

    fnode: Fnode
    segments: tuple[LogSegment, ...]


@dataclass(frozen=True, slots=True)
class Hints:
    """The starting point of a player. Empty hints play `log` from its first byte.

    `log` is the log to read to its end. Segments that name no log are in `log`, too. Files are in ascending order.
    """

    log: str
    live_fnodes: tuple[LiveFnode, ...] = ()
    properties: tuple[SetProperty, ...] = ()

    def live_segments(self) -> SegmentSet:
        """Return all segments, joined, each with its log. Raises InvalidInput when they contradict each other."""
        if not self.log:
            raise InvalidInput("hints need the name of their log; set `log`", field="log")
        found = SegmentSet()
        previous = 0
        for live in self.live_fnodes:
            if not live.segments or live.segments[0].first_seq_no != live.fnode:
                raise InvalidInput(
                    f"fnode {live.fnode} differs from the beginning of its first segment", field="live_nodes"
                )
            if live.fnode <= previous:
                raise InvalidInput(f"fnode {live.fnode} follows {previous}", field="live_nodes")
            previous = live.fnode
            for segment in live.segments:
                found.add(segment if segment.log else replace(segment, log=self.log))
        if len(found) and found.segments[-1].log != self.log:
            raise InvalidInput(f"the last segment is of {found.segments[-1].log}, not of {self.log}", field="log")
        return found

    def to_wire(self) -> wire.FSMHints:
        """Return the hints as a message. Segments of `log` name no log."""
        hints = wire.FSMHints(log=self.log)
        for live in self.live_fnodes:
            node = hints.live_nodes.add(fnode=live.fnode)
            for each in live.segments:
                node.segments.add(
                    author=each.author,
                    first_seq_no=each.first_seq_no,
                    first_offset=each.first_offset,
                    first_checksum=each.first_checksum,
                    last_seq_no=each.last_seq_no,
                    last_offset=each.last_offset,
                    log="" if each.log == self.log else each.log,
                )
        for item in self.properties:
            hints.properties.add(path=item.path, content=item.content)
        return hints

    @classmethod
    def from_wire(cls, hints: wire.FSMHints) -> Hints:
        """Return the hints of a message. They are not checked; `live_segments` does that."""
        return cls(
            hints.log,
            tuple(
                LiveFnode(Fnode(node.fnode), tuple(_segment(each, hints.log) for each in node.segments))
                for node in hints.live_nodes
            ),
            tuple(SetProperty(item.path, item.content) for item in hints.properties),
        )

    def to_json(self) -> bytes:
        """Return the hints as Gazette writes them to etcd: numbers are JSON numbers, and zero values are left out."""
        message = self.to_wire()
        document = {
            "log": message.log,
            "live_nodes": [
                {"fnode": node.fnode, "segments": [_scalars(each) for each in node.segments]}
                for node in message.live_nodes
            ],
            "properties": [_scalars(item) for item in message.properties],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Hints:
        """Return the hints of `content`, which is JSON or a serialized protobuf message. Raises CorruptData."""
        try:
            if content[:1] == b"{":
                hints = cls.from_wire(_message_of(json.loads(content)))
            else:
                hints = cls.from_wire(wire.FSMHints.FromString(content))
            hints.live_segments()
        except (DecodeError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise CorruptData(
                f"{len(content)} bytes are not hints of a recovery log: {error}; recover from other hints"
            ) from error
        return hints


def _segment(each: wire.Segment, log: str) -> LogSegment:
    return LogSegment(
        Author(each.author),
        each.first_seq_no,
        each.first_offset,
        each.first_checksum,
        each.last_seq_no,
        each.last_offset,
        each.log or log,
    )


def _scalars(message: wire.Segment | wire.Property) -> dict[str, int | str]:
    return {field.name: value for field, value in message.ListFields()}


def _message_of(document: dict[str, Any]) -> wire.FSMHints:
    return wire.FSMHints(
        log=document.get("log", ""),
        live_nodes=[
            wire.FnodeSegments(
                fnode=node.get("fnode", 0), segments=[wire.Segment(**each) for each in node.get("segments") or ()]
            )
            for node in document.get("live_nodes") or ()
        ],
        properties=[wire.Property(**item) for item in document.get("properties") or ()],
    )
