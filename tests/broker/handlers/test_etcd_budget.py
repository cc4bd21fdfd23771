"""Budgets of writes to etcd: a client over its budget is refused, on a real broker and etcd, and others continue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from pydantic import SecretStr

from coranto.client import JournalClient
from coranto.effects import SystemClock
from coranto.errors import CorantoError, PermissionDenied, Unavailable
from coranto.labels import label_set
from coranto.security.tokens import BearerToken, Capability, Claims, Keys, scope_of, sign
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import NoteRequest
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.handlers.test_authorization import KEY, STORE
from tests.broker.running import running_broker

J = "team-a/journal"
MakeSpec = Callable[..., pb.JournalSpec]


def bearer(capability: Capability, subject: str) -> BearerToken:
    """A token for the journal J alone."""
    now = SystemClock().now()
    return BearerToken.parse(sign(Claims(capability, scope_of([J]), now, now + 600, subject), Keys.parse(KEY)))


def client(process: BrokerProcess, auth: BearerToken | Keys | None = None) -> JournalClient:
    return JournalClient(process.endpoint, auth=auth, retry_timeout=0.2)


def change(spec: pb.JournalSpec, number: int = 0) -> pb.ApplyRequest.Change:
    spec.fragment.length = (1 << 20) + number
    return pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=-1)


async def refused(calls: Callable[[int], Awaitable[object]]) -> tuple[int, CorantoError]:
    """Call until a call is refused. Return the number of earlier calls, and the refusal."""
    for number in range(200):
        try:
            await calls(number)
        except Unavailable as error:
            return number, error
    raise AssertionError("nothing was refused")


async def test_notes_need_a_capability_and_stop_at_the_budget_of_their_bearer(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    settings = broker_settings.model_copy(update={"auth_keys": SecretStr(KEY), "etcd_caller_bytes": 200_000})
    async with running_broker(settings) as (process, _), client(process, Keys.parse(KEY)) as admin:
        await admin.apply([change(spec(J, stores=(STORE,)))])

        def note(by: JournalClient, number: int, **fields: object) -> Awaitable[object]:
            given = {"fragment_store": STORE, "name": f"note-{number}", "write": True, "content": b"x" * 16_000}
            return by.note(NoteRequest(**{**given, **fields}))  # type: ignore[arg-type]

        async with client(process, bearer(Capability.READ, "mallory")) as reader:
            with pytest.raises(PermissionDenied, match="NOTE"):
                await note(reader, 0)
        alice, other = bearer(Capability.NOTE, "alice"), bearer(Capability.NOTE | Capability.READ, "alice")
        async with client(process, alice) as one, client(process, other) as two:
            written, error = await refused(lambda number: note(one if number % 2 else two, number))
            assert written == 12
            assert "the bearer alice has written" in str(error)
            assert "etcd_caller_bytes" in str(error)
            assert "RESOURCE_EXHAUSTED" in str(error)
            stored = await one.note(NoteRequest(fragment_store=STORE, name="note-0"))
            assert stored is not None
            assert len(stored.content) == 16_000
        async with client(process, bearer(Capability.NOTE, "bob")) as bob:
            await note(bob, 0, expect_version=1)
        metrics = process.broker.metrics.registry
        assert (metrics.get_sample_value("coranto_etcd_writes_refused_total", {"limit": "caller"}) or 0) >= 1
        assert (metrics.get_sample_value("coranto_etcd_bytes_total") or 0) > 13 * 16_000


@pytest.mark.parametrize("with_keys", [True, False])
async def test_repeated_changes_of_a_spec_stop_at_the_budget(
    broker_settings: BrokerSettings, spec: MakeSpec, with_keys: bool
) -> None:
    keys = SecretStr(KEY) if with_keys else SecretStr("")
    settings = broker_settings.model_copy(update={"auth_keys": keys, "etcd_caller_bytes": 1_000_000})
    auth = bearer(Capability.APPLY | Capability.LIST, "alice") if with_keys else None
    large = spec(J, stores=(STORE,), labels=label_set(**{f"label-{n:03}": "x" * 1000 for n in range(100)}))
    async with running_broker(settings) as (process, _), client(process, auth) as attacker:
        rewritten, error = await refused(lambda number: attacker.apply([change(large, number)]))
        assert 5 < rewritten < 10
        assert ("the bearer alice" if with_keys else "the caller at ipv4:127.0.0.1") in str(error)


async def test_a_nearly_full_database_accepts_only_deletions(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    async with running_broker(broker_settings) as (process, _), client(process) as one:
        await one.apply([change(spec(J, stores=(STORE,)))])
    async with (
        running_broker(broker_settings.model_copy(update={"max_etcd_bytes": 1})) as (process, _),
        client(process) as one,
    ):
        with pytest.raises(Unavailable, match="max_etcd_bytes"):
            await one.apply([change(spec(J, stores=(STORE,)), 1)])
        await one.apply([pb.ApplyRequest.Change(delete=J, expect_mod_revision=-1)])
        assert not (await one.list()).journals
