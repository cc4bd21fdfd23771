"""Hostile Apply calls with a valid token: deletions of excluded journals, and malformed requests."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from pydantic import SecretStr

from coranto import labels
from coranto.coordination.etcd import Compare, Delete, Op, Put, TxnResult
from coranto.effects import SystemClock
from coranto.security.tokens import Capability, Claims, Keys, sign
from coranto.specs.validation import MAX_LABELS, MAX_SELECTOR_LABELS, MAX_SIGNATURE_SECONDS, MAX_STORES
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient

MakeSpec = Callable[..., pb.JournalSpec]
Metadata = tuple[tuple[str, str], ...]
KEY = base64.b64encode(bytes([1]) * 32).decode()
DENIED, INVALID = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT
MINE, THEIRS, NONE = "test/mine", "test/theirs", "test/none"


def token(selector: str = "", capability: Capability = Capability.ALL) -> Metadata:
    now = SystemClock().now()
    signed = sign(Claims(capability, labels.parse_selector(selector), now, now + 86_400), Keys.parse(KEY))
    return (("authorization", f"Bearer {signed}"),)


EVERYTHING = token()


class Calls:
    """A broker with keys, and calls with tokens: each returns its answer, or the status code of its error."""

    def __init__(self, process: BrokerProcess) -> None:
        self.process = process
        self.client = RawClient(process.endpoint)

    async def apply(self, metadata: Metadata, *changes: pb.ApplyRequest.Change) -> Any:
        return await self._status(self.client.stub.Apply(pb.ApplyRequest(changes=changes), metadata=metadata))

    async def read(self, metadata: Metadata, **fields: Any) -> Any:
        return await self._last(self.client.stub.Read(pb.ReadRequest(**fields), metadata=metadata))

    async def append(self, metadata: Metadata, *messages: pb.AppendRequest) -> Any:
        async def stream() -> AsyncIterator[pb.AppendRequest]:
            for message in messages:
                yield message

        return await self._status(self.client.stub.Append(stream(), metadata=metadata))

    async def replicate(self, metadata: Metadata, message: pb.ReplicateRequest) -> Any:
        async def stream() -> AsyncIterator[pb.ReplicateRequest]:
            yield message

        return await self._last(self.client.stub.Replicate(stream(), metadata=metadata))

    async def fragments(self, metadata: Metadata, **fields: Any) -> Any:
        return await self._status(self.client.stub.ListFragments(pb.FragmentsRequest(**fields), metadata=metadata))

    async def listing(self, metadata: Metadata, **fields: Any) -> Any:
        try:
            answers = [each async for each in self.client.stub.List(pb.ListRequest(**fields), metadata=metadata)]
        except grpc.aio.AioRpcError as error:
            return error.code()
        return [journal.spec.name for each in answers for journal in each.journals]

    async def http(self, method: str, path: str, metadata: Metadata, **headers: str) -> int:
        async with aiohttp.ClientSession() as session:
            url = f"{self.process.http_endpoint}{path}"
            async with session.request(method, url, headers={**dict(metadata), **headers}, data=b"x" * 3) as answer:
                return answer.status

    @staticmethod
    async def _status(call: Any) -> Any:
        try:
            return (await call).status
        except grpc.aio.AioRpcError as error:
            return error.code()

    @staticmethod
    async def _last(call: Any) -> Any:
        try:
            return [each.status async for each in call][-1]
        except grpc.aio.AioRpcError as error:
            return error.code()


@pytest.fixture
async def calls(broker_settings: BrokerSettings, spec: MakeSpec) -> AsyncIterator[Calls]:
    """Run a broker with two journals: the caller's, and another."""
    secured = broker_settings.model_copy(update={"auth_keys": SecretStr(KEY), "http_port": 0})
    async with BrokerProcess(secured) as process:
        calls = Calls(process)
        mine, theirs = (spec(name, labels=labels.label_set(env=env)) for name, env in ((MINE, "dev"), (THEIRS, "prod")))
        assert await calls.apply(EVERYTHING, upsert(mine), upsert(theirs)) == pb.OK
        yield calls
        await calls.client.close()


def upsert(spec: pb.JournalSpec, revision: int = -1) -> pb.ApplyRequest.Change:
    return pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=revision)


def delete(name: str, revision: int = -1) -> pb.ApplyRequest.Change:
    return pb.ApplyRequest.Change(delete=name, expect_mod_revision=revision)


# --------------------------------------------------------------------------------------------------------- deletions


@pytest.mark.parametrize("scope", ["env != prod", "env = dev", "env=dev,name:prefix=test/", "!prod,env!=prod"])
async def test_a_token_does_not_delete_journals_that_it_excludes(calls: Calls, scope: str) -> None:
    held = token(scope)
    assert await calls.apply(held, delete(THEIRS)) is DENIED
    assert await calls.apply(held, delete(MINE), delete(THEIRS)) is DENIED
    assert await calls.listing(EVERYTHING) == [MINE, THEIRS]
    assert await calls.apply(held, delete(MINE)) == pb.OK
    assert await calls.listing(EVERYTHING) == [THEIRS]


async def test_a_deletion_spares_a_journal_that_was_relabelled_concurrently(
    calls: Calls, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of the labels and the transaction, the labels change so that the token excludes the journal."""
    coordinator = calls.process.broker.coordinator
    key = calls.process.broker.keyspace.layout.item_key(MINE)
    relabelled = Put(key, spec(MINE, labels=labels.label_set(env="prod")).SerializeToString(deterministic=True))
    txn = coordinator.txn

    async def late(compares: Sequence[Compare], ops: Sequence[Op], **given: Any) -> TxnResult:
        if Delete(key) in ops:
            await txn([], [relabelled])
        return await txn(compares, ops, **given)

    monkeypatch.setattr(coordinator, "txn", late)
    assert await calls.apply(token("env != prod"), delete(MINE)) is DENIED
    assert await calls.listing(EVERYTHING) == [MINE, THEIRS]


async def test_a_deletion_of_a_free_name_requires_a_scope_that_includes_it(calls: Calls) -> None:
    for scope, answer in (("env=dev", DENIED), ("name=test/other", DENIED), (f"name={NONE}", pb.OK)):
        assert await calls.apply(token(scope), delete(NONE)) == answer, scope


async def test_a_scope_of_names_needs_no_check_of_labels(calls: Calls) -> None:
    assert await calls.apply(token(f"name={THEIRS}"), delete(MINE)) is DENIED
    assert await calls.apply(token(f"name!={THEIRS}"), delete(THEIRS)) is DENIED
    assert await calls.apply(token(f"name={THEIRS}"), delete(THEIRS)) == pb.OK


# ------------------------------------------------------------------------------------------- refusals before validation


async def test_a_missing_permission_is_reported_for_any_request(calls: Calls, spec: MakeSpec) -> None:
    """A malformed request gets the same answer as a valid one, and as one for a missing journal."""
    outside = token("env=dev")
    bad_labels = pb.LabelSet(labels=[pb.Label(name="b", value="\n"), pb.Label(name="a")])
    header = pb.Header(route=pb.Route(primary=7), etcd=pb.Header.Etcd())
    for journal in (THEIRS, NONE, f"{THEIRS};", "x#y", "../" + THEIRS, "n" * 5000):
        assert await calls.read(outside, journal=journal, offset=-5) == pb.JOURNAL_NOT_FOUND, journal
        assert await calls.read(outside, journal=journal, header=header) == pb.JOURNAL_NOT_FOUND
        assert await calls.fragments(outside, journal=journal, page_limit=-1) == pb.JOURNAL_NOT_FOUND
        assert await calls.fragments(outside, journal=journal, next_page_token=-1) == pb.JOURNAL_NOT_FOUND
        append = pb.AppendRequest(journal=journal, union_registers=bad_labels)
        assert await calls.append(outside, append, pb.AppendRequest()) == pb.JOURNAL_NOT_FOUND
        proposal = pb.Fragment(journal=journal, begin=5, end=1)
        message = pb.ReplicateRequest(header=header, proposal=proposal, acknowledge=True)
        assert await calls.replicate(outside, message) == pb.JOURNAL_NOT_FOUND
        change = upsert(spec(journal, labels=bad_labels), -7)
        change.upsert.replication = 99
        assert await calls.apply(outside, change) is DENIED
        assert await calls.apply(outside, delete(journal, -7)) is DENIED
    for path in (f"/{THEIRS}?offset=x", f"/{NONE}?offset=x", f"/{THEIRS}?nonsense=1", "/%ff?offset=x"):
        assert await calls.http("GET", path, outside) == 404
        assert await calls.http("HEAD", path, outside) == 404
        assert await calls.http("PUT", path, outside) == 404
    assert await calls.http("GET", f"/{THEIRS}", outside, Range="bytes=9-1") == 404
    # A permitted caller gets the validation error.
    for metadata in (token("env=prod"), EVERYTHING):
        assert await calls.read(metadata, journal=THEIRS, offset=-5) is INVALID
        assert await calls.fragments(metadata, journal=THEIRS, page_limit=-1) is INVALID
        assert await calls.append(metadata, pb.AppendRequest(journal=THEIRS, union_registers=bad_labels)) is INVALID
        assert await calls.http("GET", f"/{THEIRS}?offset=x", metadata) == 400
        change = upsert(spec(THEIRS, labels=labels.label_set(env="prod")))
        change.upsert.replication = 99
        assert await calls.apply(metadata, change) is INVALID
    # Without the capability, no other check is made.
    reader = token(capability=Capability.LIST)
    assert await calls.apply(reader, delete("x#y", -7)) is DENIED
    assert await calls.append(reader, pb.AppendRequest(journal="x#y")) is DENIED
    assert await calls.read(reader, journal="x#y") is DENIED
    assert await calls.http("PUT", "/%ff?offset=x", reader) == 403


# ------------------------------------------------------------------------------------------------------------ bounds


async def test_the_size_of_requests_is_bounded(calls: Calls, spec: MakeSpec) -> None:
    many = [(f"label-{number:05}", "") for number in range(MAX_LABELS + 1)]
    assert await calls.apply(EVERYTHING, upsert(spec("a/few", labels=labels.label_set(many[1:])))) == pb.OK
    assert await calls.apply(EVERYTHING, upsert(spec("a/many", labels=labels.label_set(many)))) is INVALID
    stores = tuple(f"file:///{number}/" for number in range(MAX_STORES + 1))
    assert await calls.apply(EVERYTHING, upsert(spec("a/stores", stores=stores))) is INVALID
    large = labels.label_set([(f"label-{number:05}", "x" * 1000) for number in range(300)])
    assert await calls.apply(EVERYTHING, upsert(spec("a/large", labels=large))) is INVALID
    assert await calls.fragments(EVERYTHING, journal=MINE, signatureTTL={"seconds": MAX_SIGNATURE_SECONDS}) == pb.OK
    for seconds in (MAX_SIGNATURE_SECONDS + 1, (1 << 63) - 1):
        assert await calls.fragments(EVERYTHING, journal=MINE, signatureTTL={"seconds": seconds}) is INVALID
    names = [("name", f"{MINE}-{number:06}") for number in range(MAX_SELECTOR_LABELS)]
    selector = labels.label_selector(include=[("name", MINE), *names[1:]])
    assert await calls.listing(EVERYTHING, selector=selector) == [MINE]
    selector = labels.label_selector(include=[("name", MINE), *names])
    assert await calls.listing(EVERYTHING, selector=selector) is INVALID


async def test_a_refusal_fits_into_an_answer(calls: Calls, spec: MakeSpec) -> None:
    """gRPC limits the end of a call to 8 KiB. A longer one would replace the reason by an error about its length."""
    change = upsert(spec(stores=("s3://" + "x" * 1_000_000,)))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await calls.client.stub.Apply(pb.ApplyRequest(changes=[change]), metadata=EVERYTHING)
    assert refused.value.code() is INVALID
    assert len(refused.value.details() or "") < 2000
