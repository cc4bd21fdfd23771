"""Checks of appends over frames at the level of bytes: sent, answered, and reported to clients.

An independent parser reads both directions of each client's connections, at the transport. It identifies the appends
of a broken connection that were sent and have no answer. Exactly those may be reported as unknown. The anomalies:

========================  ==========================================================================================
misreported-append        an append that was sent and not answered was reported as applied, or as not applied; or one
                          that was answered was reported as unknown
foreign-answer            a client got another outcome of its append than the broker's answer to it
broken-frames             one side rejected the other's bytes as invalid frames, or as frames in an invalid place
========================  ==========================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from coranto.testing.histories import Operation, OperationOutcome
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch
from coranto.wire.frames_pb2 import FrameEnd, FrameOpening
from tests.simulation.broker.world import World
from tests.simulation.kit.checker import Anomaly
from tests.simulation.kit.tcp import SimTransport

_OPENING, _MESSAGE, _END = 1, 3, 4
_INVALID = 3
_PREFACE_BYTES = 8
_HEADER = struct.Struct(">IB")


@dataclass(slots=True)
class _Direction:
    """The unparsed bytes of one direction."""

    pending: bytearray = field(default_factory=bytearray)
    begun: bool = False

    def frames(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        self.pending += data
        if not self.begun and len(self.pending) >= _PREFACE_BYTES:
            del self.pending[:_PREFACE_BYTES]
            self.begun = True
        while self.begun and len(self.pending) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self.pending)
            if len(self.pending) < _HEADER.size + length:
                return
            yield kind, bytes(self.pending[_HEADER.size : _HEADER.size + length])
            del self.pending[: _HEADER.size + length]


@dataclass(slots=True)
class _Sent:
    answer: AppendAnswer | None = None


@dataclass(slots=True)
class _Wire:
    """A connection at its client's transport."""

    method: str = ""
    sent: _Direction = field(default_factory=_Direction)
    received: _Direction = field(default_factory=_Direction)
    by_id: dict[int, _Sent] = field(default_factory=dict)


class FrameAudit:
    """Parser of all connections of a world, and checks of its clients' appends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._brokers = {machine.name for machine in world.machines}
        self._wires: dict[SimTransport, _Wire] = {}
        self._sent: dict[bytes, list[_Sent]] = {}
        world.tcp.on_bytes = self._parse

    def check(self, operation: Operation, *, retried: bool, given_up: bool) -> None:
        """Check the outcome of an append that its client got.

        `retried`: it may have been sent several times, also over gRPC. `given_up`: its caller did not wait for the
        outcome.
        """
        tries = self._sent.get(operation.content, []) if operation.content else []
        answers = [each.answer for each in tries if each.answer is not None]
        if not tries:
            return
        open_tries = len(tries) - len(answers)
        commits = [pb.AppendResponse.FromString(each.response) for each in answers if not each.code]
        done = [each.commit for each in commits if each.status == pb.OK]
        coverage, outcome = self._world.coverage, operation.outcome
        if outcome is OperationOutcome.OK:
            coverage.sometimes("an append over frames was acknowledged")
            if done and all((each.begin, each.end) != (operation.begin, operation.end) for each in done):
                answered = [(each.begin, each.end) for each in done]
                self._found("foreign-answer", operation, f"the broker answered {answered}")
            elif not done and not retried:
                self._found("misreported-append", operation, "no answer says so")
        elif outcome is OperationOutcome.FAIL:
            if done:
                self._found("foreign-answer", operation, "the broker answered that it is applied")
            elif open_tries:
                self._found("misreported-append", operation, "it was sent, and not answered")
        elif outcome is OperationOutcome.INFO and not given_up:
            coverage.sometimes("an append over frames had no answer", open_tries)
            if not open_tries and not any(each.code for each in answers) and not retried:
                self._found("misreported-append", operation, "it was answered")

    def _found(self, name: str, operation: Operation, why: str) -> None:
        self._world.anomalies.append(Anomaly(name, operation.journal, f"{operation}; {why}"))

    def _parse(self, end: SimTransport, sent: bool, data: bytes) -> None:
        if not end.is_client:
            return
        wire = self._wires.setdefault(end, _Wire())
        direction = wire.sent if sent else wire.received
        for kind, payload in direction.frames(data):
            if sent and kind == _OPENING:
                wire.method = FrameOpening.FromString(payload).method
            elif kind == _END and (end_of := FrameEnd.FromString(payload)).code == _INVALID:
                side = end.node if sent else end.peer[0]
                what = f"{side} has ended a call of {wire.method}: {end_of.details}"
                self._world.anomalies.append(Anomaly("broken-frames", "-", what))
            elif kind != _MESSAGE:
                continue
            elif wire.method == "Replicate":
                self._world.coverage.sometimes("journals were replicated over frames")
            elif end.node in self._brokers:
                self._world.coverage.sometimes("appends were forwarded over frames")
            elif sent:
                for append in AppendBatch.FromString(payload).appends:
                    wire.by_id[append.id] = found = _Sent()
                    self._sent.setdefault(append.content, []).append(found)
            else:
                for answer in AppendAnswers.FromString(payload).answers:
                    if answer.id in wire.by_id:
                        wire.by_id[answer.id].answer = answer
