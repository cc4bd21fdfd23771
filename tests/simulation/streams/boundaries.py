"""Faults at the boundaries between the messages of a writer's append: before or after the delivery of one of them.

An append on a stream is one request and one response, which may contain other appends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coranto.testing.sim.rpc import SimCall
from coranto.wire.append_stream_pb2 import AppendAnswers, AppendBatch

from .world import StreamWorld

MESSAGES = ("open", "request", "content", "commit", "end", "response", "status")
"""The messages of an append in its own call, in order. The last two go to the client."""
STREAMED = ("request", "response")
"""The messages of an append on a stream."""

WRITERS = ("writer-", "mover-")
"""The prefixes of the names of nodes whose appends get faults."""
_ACTS = ("break", "cut", "kill broker", "move primary", "kill writer", "usurp")
_WEIGHTS = (12, 2, 2, 1, 2, 3)


@dataclass(slots=True)
class _Plan:
    message: str
    after: bool
    act: str


class Boundaries:
    """Injector of faults into calls of programs that write."""

    def __init__(self, world: StreamWorld, strike_writer: Callable[[str, str], None]) -> None:
        """Create the injector. `strike_writer` gets the node, and `kill writer` or `usurp`."""
        self._world = world
        self._strike_writer = strike_writer
        self._plans: dict[SimCall, _Plan] = {}
        self._requested: set[SimCall] = set()

    def start(self) -> None:
        self._world.rpc.on_delivery = self._intercept

    def stop(self) -> None:
        self._world.rpc.on_delivery = None
        self._plans.clear()
        self._requested.clear()

    def _intercept(self, call: SimCall, to_server: bool, message: tuple[Any, ...]) -> bool:
        if call.method.name not in ("Append", "AppendStream") or not call.node.startswith(WRITERS):
            return True
        streamed = call.method.name == "AppendStream"
        name = _streamed(to_server, message) if streamed else self._name(call, to_server, message)
        if streamed and name == "request":
            self._consider(call, STREAMED)
        elif not streamed and name == "open":
            self._consider(call, MESSAGES)
        plan = self._plans.get(call)
        if name == "status":
            self._plans.pop(call, None)
            self._requested.discard(call)
        if plan is None or plan.message != name:
            return True
        self._plans.pop(call, None)
        world = self._world
        when = "after" if plan.after else "before"
        world.coverage.sometimes(f"{plan.act} {when} {name}")
        world.loop.note(f"boundary: {plan.act} {when} {name} of {call.node} at {call.peer}")
        if plan.after:
            # While it is handled.
            world.loop.later(world.rng.choice((0.0, world.rng.uniform(0.0, 0.005))), self._strike, call, plan.act)
            return True
        if plan.act == "break":
            return False
        self._strike(call, plan.act)
        return True

    def _name(self, call: SimCall, to_server: bool, message: tuple[Any, ...]) -> str:
        kind: str = message[0]
        if not to_server:
            return "response" if kind == "message" else "status"
        if kind != "message":
            return kind
        if call not in self._requested:
            self._requested.add(call)
            return "request"
        return "content" if message[1] else "commit"

    def _consider(self, call: SimCall, messages: Sequence[str]) -> None:
        rng = self._world.rng
        if rng.random() < self._world.stream_options.harm:
            act = rng.choices(_ACTS, _WEIGHTS)[0]
            self._plans[call] = _Plan(rng.choice(messages), rng.random() < 0.5, act)

    def _strike(self, call: SimCall, act: str) -> None:
        world = self._world
        machine = next((each for each in world.machines if each.name == call.peer), None)
        if act == "break":
            world.rpc.break_call(call)
        elif act == "cut":
            repair = world.network.cut_both(call.node, call.peer)
            world.loop.later(world.rng.uniform(0.05, 3.0), repair)
        elif act in ("kill writer", "usurp"):
            self._strike_writer(call.node, act)
        elif machine is not None and act == "kill broker":
            machine.kill()
        elif machine is not None:
            machine.stop_requested.set()


def _streamed(to_server: bool, message: tuple[Any, ...]) -> str:
    """Name a message of a stream; empty if it has no append."""
    if message[0] != "message":
        return "status" if message[0] == "status" else ""
    if to_server:
        return "request" if AppendBatch.FromString(message[1]).appends else ""
    return "response" if AppendAnswers.FromString(message[1]).answers else ""
