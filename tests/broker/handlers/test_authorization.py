"""Authorization: every RPC with every kind of token, TLS with generated certificates, and clusters that use both."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import structlog
import trustme
from pydantic import SecretStr

from coranto import labels
from coranto.client import ClientConfig, ClientTls, JournalClient
from coranto.client.peer_status import PeerStatus
from coranto.effects import SystemClock
from coranto.errors import (
    CorantoError,
    InvalidInput,
    JournalNotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from coranto.security.server import check_exposure, keys_of, peer_tls, server_credentials
from coranto.security.tokens import LEEWAY_SECONDS, BearerToken, Capability, Claims, Keys, Secret, sign
from coranto.wire import append_stream_pb2_grpc, heads_pb2, heads_pb2_grpc
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto.wire.append_stream_pb2 import AppendBatch, StreamedAppend
from coranto_broker.authorization import RULES, Authorizer, TokenExpired
from coranto_broker.handlers.errors import code_of
from coranto_broker.http import gateway
from coranto_broker.rpc.first_write import WholeFirstWrite
from coranto_broker.server.process import BrokerProcess
from coranto_broker.server.service import SERVICES, JournalService
from coranto_broker.settings import BrokerSettings
from tests.broker.running import ManualClock, eventually

J = "team-a/journal"
OTHER = "team-b/journal"
STORE = "file:///frags/"
KEY, SECOND, FOREIGN = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2, 3))
MakeSpec = Callable[..., pb.JournalSpec]
Metadata = tuple[tuple[str, str], ...]
METHODS = [method.name for service in SERVICES for method in service.methods]
ALL_METHODS = [*METHODS, *gateway.METHODS]
"""The RPCs, and the HTTP methods of the gateway."""


def token(capability: int = Capability.ALL, selector: str = "", *, seconds: float = 60.0, key: str = KEY) -> Metadata:
    now = SystemClock().now()
    claims = Claims(Capability(capability), labels.parse_selector(selector), now - 1000, now + seconds)
    return (("authorization", f"Bearer {sign(claims, Keys.parse(key))}"),)


@contextlib.asynccontextmanager
async def broker_status(call: grpc.aio.Call) -> AsyncIterator[None]:
    """Raise the broker's status also for a call that it refuses before the first message is sent."""
    ended = PeerStatus(call)
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise await ended.error_of(error) from error


class Calls:
    """Each RPC for the journal J with given metadata: its answer, or the gRPC status of its end."""

    def __init__(self, process: BrokerProcess, spec: pb.JournalSpec) -> None:
        self.channel = grpc.aio.insecure_channel(
            process.endpoint.removeprefix("http://"), options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub: pb_grpc.JournalAsyncStub = pb_grpc.JournalStub(self.channel)
        self.heads: heads_pb2_grpc.JournalsAsyncStub = heads_pb2_grpc.JournalsStub(self.channel)
        self.streams: append_stream_pb2_grpc.AppendsAsyncStub = append_stream_pb2_grpc.AppendsStub(self.channel)
        self._process = process
        self._spec = spec

    async def call(self, method: str, metadata: Metadata | None) -> Any:
        if method in gateway.METHODS:
            return await self.http(method, metadata)
        try:
            return await getattr(self, method)(metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()

    async def http(self, method: str, metadata: Metadata | None) -> int:
        """Return the HTTP status of the gateway's answer."""
        async with aiohttp.ClientSession() as session:
            url = f"{self._process.http_endpoint}/{J}"
            async with session.request(
                method, url, headers=metadata or (), data=b"" if method == "PUT" else None
            ) as found:
                if found.status == 401:
                    assert found.headers["WWW-Authenticate"] == "Bearer"
                return found.status

    async def List(self, metadata: Metadata | None) -> list[str]:
        responses = self.stub.List(pb.ListRequest(), metadata=metadata)
        return [journal.spec.name async for response in responses for journal in response.journals]

    async def Apply(self, metadata: Metadata | None) -> pb.Status.ValueType:
        change = pb.ApplyRequest.Change(upsert=self._spec, expect_mod_revision=-1)
        return (await self.stub.Apply(pb.ApplyRequest(changes=[change]), metadata=metadata)).status

    async def Read(self, metadata: Metadata | None) -> pb.Status.ValueType:
        request = pb.ReadRequest(journal=J)
        return [response.status async for response in self.stub.Read(request, metadata=metadata)][-1]

    async def Append(self, metadata: Metadata | None) -> pb.Status.ValueType:
        async def messages() -> AsyncIterator[pb.AppendRequest]:
            yield pb.AppendRequest(journal=J)
            yield pb.AppendRequest()

        call = self.stub.Append(messages(), metadata=metadata)
        async with broker_status(call):
            return (await call).status

    async def AppendStream(self, metadata: Metadata | None) -> Any:
        call = self.streams.AppendStream(metadata=metadata)
        await call.write(AppendBatch())
        await call.read()
        await call.write(AppendBatch(appends=[StreamedAppend(id=1, request=pb.AppendRequest(journal=J))]))
        await call.done_writing()
        (answer,) = (await call.read()).answers
        assert await call.read() is grpc.aio.EOF
        assert answer.code == 0
        return pb.AppendResponse.FromString(answer.response).status

    async def Replicate(self, metadata: Metadata | None) -> pb.Status.ValueType:
        async def messages() -> AsyncIterator[pb.ReplicateRequest]:
            header = pb.Header(route=pb.Route(primary=-1), etcd=self._process.broker.keyspace.header.to_wire())
            proposal = pb.Fragment(journal=J, compression_codec=pb.NONE)
            yield pb.ReplicateRequest(
                header=header, proposal=proposal, registers=pb.LabelSet(), acknowledge=True, deprecated_journal=J
            )

        call = self.stub.Replicate(messages(), metadata=metadata)
        async with broker_status(call):
            (status,) = [response.status async for response in call]
            return status

    async def ListFragments(self, metadata: Metadata | None) -> pb.Status.ValueType:
        return (await self.stub.ListFragments(pb.FragmentsRequest(journal=J), metadata=metadata)).status

    async def FragmentStoreHealth(self, metadata: Metadata | None) -> pb.Status.ValueType:
        request = pb.FragmentStoreHealthRequest(fragment_store=STORE)
        return (await self.stub.FragmentStoreHealth(request, metadata=metadata)).status

    async def Heads(self, metadata: Metadata | None) -> list[str]:
        responses = self.heads.Heads(heads_pb2.HeadsRequest(), metadata=metadata)
        return [head.journal async for response in responses for head in response.heads]

    async def Note(self, metadata: Metadata | None) -> pb.Status.ValueType:
        request = heads_pb2.NoteRequest(fragment_store=STORE, name="n")
        return (await self.heads.Note(request, metadata=metadata)).status


@contextlib.asynccontextmanager
async def running(settings: BrokerSettings, spec: pb.JournalSpec) -> AsyncIterator[Calls]:
    """Run a broker with this journal, ready for appends."""
    async with BrokerProcess(settings) as process:
        calls = Calls(process, spec)
        try:
            keys = settings.auth_keys.get_secret_value()
            everything = token(key=keys.split(",")[-1]) if keys else None
            assert await calls.Apply(everything) == pb.OK

            async def ready() -> bool:
                return bool(await calls.Append(everything) == pb.OK)

            await eventually(ready)
            yield calls
        finally:
            await calls.channel.close()


@pytest.fixture
def secured(broker_settings: BrokerSettings) -> BrokerSettings:
    return broker_settings.model_copy(update={"auth_keys": SecretStr(KEY), "http_port": 0})


@pytest.fixture
def journal(spec: MakeSpec) -> pb.JournalSpec:
    return spec(J, stores=(STORE,), labels=labels.label_set(team="a"))


def test_every_method_has_a_rule() -> None:
    """A new RPC needs an entry here with its capability."""
    assert sorted(RULES) == sorted(METHODS)
    servicers = (pb_grpc.JournalServicer, heads_pb2_grpc.JournalsServicer, append_stream_pb2_grpc.AppendsServicer)
    methods = [entry for servicer in servicers for entry in vars(servicer).items()]
    served = [name for name, value in methods if callable(value) and name[0] != "_"]
    assert sorted(served) == sorted(RULES)
    assert all(name in vars(JournalService) for name in RULES)
    assert all(RULES[name] for name in RULES)
    assert all(RULES[name] for name in gateway.METHODS.values())


DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
NARROW = "name=team-a/journal"
WRONG_SELECTOR: dict[str, Any] = {
    "List": [],
    "Apply": DENIED,
    "Read": pb.JOURNAL_NOT_FOUND,
    "Append": pb.JOURNAL_NOT_FOUND,
    "AppendStream": pb.JOURNAL_NOT_FOUND,
    "Replicate": pb.JOURNAL_NOT_FOUND,
    "ListFragments": pb.JOURNAL_NOT_FOUND,
    "FragmentStoreHealth": DENIED,
    "Heads": [],
    "Note": DENIED,
    **dict.fromkeys(gateway.METHODS, 404),
}
RIGHT: dict[str, Any] = {
    "List": [J],
    "Apply": pb.OK,
    "Read": pb.OFFSET_NOT_YET_AVAILABLE,
    "Append": pb.OK,
    "AppendStream": pb.OK,
    "Replicate": pb.WRONG_ROUTE,
    "ListFragments": pb.OK,
    "FragmentStoreHealth": pb.OK,
    "Heads": [J],
    "Note": pb.OK,
    "GET": 416,
    "HEAD": 416,
    "PUT": 204,
}
HTTP = {DENIED: 403, UNKNOWN: 401}
"""The gateway's HTTP status for each status of an RPC."""


def matrix() -> Iterator[tuple[str, str, Metadata | None, Any]]:
    """Yield every method with every kind of token, and the expected answer."""
    for method in ALL_METHODS:
        needed = RULES[gateway.METHODS.get(method, method)]
        good = token(needed, NARROW)[0][1]
        yield method, "no token", None, UNKNOWN
        yield method, "an expired token", token(needed, seconds=-6), UNKNOWN
        yield method, "a token of a foreign key", token(key=FOREIGN), UNKNOWN
        yield method, "a token that is cut short", (("authorization", good[:-8]),), UNKNOWN
        yield method, "another scheme", (("authorization", "Basic " + good.removeprefix("Bearer ")),), UNKNOWN
        yield method, "two tokens", (("authorization", good), ("authorization", good)), UNKNOWN
        yield method, "no capability", token(0), DENIED
        yield method, "every other capability", token(Capability.ALL & ~needed), DENIED
        yield method, "a wrong name", token(needed, "name=team-b/journal"), WRONG_SELECTOR[method]
        yield method, "a wrong label", token(needed, "team=b"), WRONG_SELECTOR[method]
        yield method, "an exclusion", token(needed, "team != a"), WRONG_SELECTOR[method]
        yield method, "the right name", token(needed, NARROW), RIGHT[method]
        yield method, "the right label", token(needed, "team=a"), RIGHT[method]
        yield method, "no scope but the capability", token(needed), RIGHT[method]
        yield method, "every capability", token(), RIGHT[method]


async def test_every_method_with_every_token(
    secured: BrokerSettings, journal: pb.JournalSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    given: list[Metadata] = []
    with structlog.testing.capture_logs() as logs:
        async with running(secured, journal) as calls:
            for method, kind, metadata, expected in matrix():
                answer = await calls.call(method, metadata)
                if method in gateway.METHODS:
                    expected = HTTP.get(expected, expected)
                assert answer == expected, f"{method} with {kind}: {answer}, not {expected}"
                given.append(metadata or ())
    assert len(given) == 15 * (10 + 3)
    # Refusals are logged, secrets are not.
    written = f"{logs} {caplog.text}"
    assert "the token has expired" in written
    for metadata in given:
        for _, value in metadata:
            assert value.split(".")[1] not in written
    assert KEY not in written


async def test_without_keys_tokens_are_ignored(broker_settings: BrokerSettings, journal: pb.JournalSpec) -> None:
    async with running(broker_settings.model_copy(update={"http_port": 0}), journal) as calls:
        for metadata in (None, token(0, key=FOREIGN), (("authorization", "nonsense"),)):
            for method in ALL_METHODS:
                assert await calls.call(method, metadata) == RIGHT[method], method


async def test_while_keys_are_introduced_a_token_may_be_missing_but_not_invalid(
    secured: BrokerSettings, journal: pb.JournalSpec
) -> None:
    settings = secured.model_copy(update={"auth_keys": SecretStr(f"AA==,{KEY}")})
    async with running(settings, journal) as calls:
        for method in ALL_METHODS:
            assert await calls.call(method, None) == RIGHT[method], method
            assert await calls.call(method, token(key=FOREIGN)) in (UNKNOWN, 401), method
            assert await calls.call(method, token(0)) in (DENIED, 403), method


async def test_all_keys_are_accepted_while_they_rotate(secured: BrokerSettings, journal: pb.JournalSpec) -> None:
    settings = secured.model_copy(update={"auth_keys": SecretStr(f"{SECOND},{KEY}")})
    async with running(settings, journal) as calls:
        for key in (KEY, SECOND):
            assert await calls.call("Append", token(key=key)) == pb.OK
        assert await calls.call("Append", token(key=FOREIGN)) is UNKNOWN


async def test_a_journal_out_of_scope_looks_like_one_that_does_not_exist(
    secured: BrokerSettings, journal: pb.JournalSpec
) -> None:
    async with running(secured, journal) as calls:
        scope = token(Capability.READ | Capability.APPEND, "team=b")
        hidden = await calls.stub.ListFragments(pb.FragmentsRequest(journal=J), metadata=scope)
        missing = await calls.stub.ListFragments(pb.FragmentsRequest(journal="no/such"), metadata=scope)
        assert hidden == missing
        assert not hidden.header.route.members
        # With a sufficient scope, the same journal is resolved.
        assert await calls.call("ListFragments", token(selector="team=a")) == pb.OK
        # A segment of metadata does not make it another journal.
        meta = pb.FragmentsRequest(journal=f"{J};part=1")
        assert (await calls.stub.ListFragments(meta, metadata=scope)).status == pb.JOURNAL_NOT_FOUND
        assert (await calls.stub.ListFragments(meta, metadata=token(selector=NARROW))).status == pb.OK


async def apply(calls: Calls, metadata: Metadata, *changes: pb.ApplyRequest.Change) -> Any:
    try:
        return (await calls.stub.Apply(pb.ApplyRequest(changes=changes), metadata=metadata)).status
    except grpc.aio.AioRpcError as error:
        return error.code()


def upsert(spec: pb.JournalSpec, revision: int = -1) -> pb.ApplyRequest.Change:
    return pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=revision)


def delete(name: str) -> pb.ApplyRequest.Change:
    return pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1)


async def test_changes_of_journals_stay_within_scope(
    secured: BrokerSettings, journal: pb.JournalSpec, spec: MakeSpec
) -> None:
    def of_team(name: str, team: str) -> pb.JournalSpec:
        return spec(name, labels=labels.label_set(team=team))

    async with running(secured, journal) as calls:
        team_b = token(Capability.APPLY, "team=b")
        assert await apply(calls, team_b, upsert(of_team(OTHER, "b"))) == pb.OK
        assert await apply(calls, team_b, upsert(of_team(OTHER, "b"))) == pb.OK
        # Labels can neither give a journal away nor take it over.
        assert await apply(calls, team_b, upsert(of_team(OTHER, "a"))) is DENIED
        assert await apply(calls, team_b, upsert(of_team(J, "b"))) is DENIED
        # One change out of scope stops the whole call.
        assert await apply(calls, team_b, upsert(of_team("team-b/2", "b")), upsert(of_team("team-a/2", "a"))) is DENIED
        assert await calls.List(token()) == [J, OTHER]
        # A deleted journal must be in scope, by its name and its labels.
        assert await apply(calls, team_b, delete(J)) is DENIED
        assert await apply(calls, team_b, delete("team-b/no-such")) is DENIED
        assert await apply(calls, token(Capability.APPLY, "name:prefix=team-a/"), delete(OTHER)) is DENIED
        assert await apply(calls, token(Capability.APPLY, "name:prefix=team-b/,team!=b"), delete(OTHER)) is DENIED
        assert await apply(calls, token(Capability.APPLY, "name:prefix=team-b/"), delete(OTHER)) == pb.OK
        assert await calls.List(token()) == [J]


async def test_a_call_ends_when_its_token_does(
    secured: BrokerSettings, journal: pb.JournalSpec, token_ends: list[asyncio.Timeout]
) -> None:
    patient = secured.model_copy(update={"min_append_rate": 0})
    async with running(patient, journal) as calls:
        loop = asyncio.get_running_loop()
        token_ends.clear()
        begun = loop.time()
        brief = token(Capability.ALL, NARROW, seconds=30.0)

        async def watch() -> None:
            async for _ in calls.stub.List(pb.ListRequest(watch=True), metadata=brief):
                pass

        async def tail() -> None:
            async for _ in calls.stub.Read(pb.ReadRequest(journal=J, offset=-1, block=True), metadata=brief):
                pass

        async def append() -> None:
            call = calls.stub.Append(metadata=brief)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # It may have ended already.
                await call.write(pb.AppendRequest(journal=J))
                await call.write(pb.AppendRequest(content=b"never committed"))
            await call

        work: list[Callable[[], Awaitable[None]]] = [watch, tail, append]
        calls_made = asyncio.gather(*(each() for each in work), return_exceptions=True)
        await eventually(lambda: len(token_ends) == len(work) and all(end.when() for end in token_ends))
        for end in token_ends:
            when = end.when()
            assert when is not None
            # Measured from the token's creation, with tolerance for its whole seconds and for two clocks.
            assert begun - 1.1 <= when - (30.0 + LEEWAY_SECONDS) <= loop.time() + 0.1
            end.reschedule(loop.time())
        ends = await asyncio.wait_for(calls_made, 60)
        for end in ends:
            assert isinstance(end, grpc.aio.AioRpcError)
            assert end.code() is grpc.StatusCode.DEADLINE_EXCEEDED, end
            assert "token has expired" in (end.details() or "")
        # The append was rolled back, and the journal continues.
        assert await calls.call("Append", token()) == pb.OK
        assert await calls.call("Read", token()) == pb.OFFSET_NOT_YET_AVAILABLE


async def test_a_client_whose_token_ends_during_the_first_message_gets_the_status(
    secured: BrokerSettings,
    journal: pb.JournalSpec,
    token_ends: list[asyncio.Timeout],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = WholeFirstWrite._write

    async def write(context: WholeFirstWrite, message: object) -> None:
        token_ends[-1].reschedule(asyncio.get_running_loop().time())
        await real(context, message)

    async def watch(calls: Calls) -> None:
        async for _ in calls.stub.List(pb.ListRequest(watch=True), metadata=token()):
            pass

    async with running(secured, journal) as calls:
        monkeypatch.setattr(WholeFirstWrite, "_write", write)
        for _ in range(10):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(watch(calls), 60)
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class _Context:
    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata


async def test_only_the_end_of_the_token_is_reported_as_its_expiry() -> None:
    clock = ManualClock()
    keys = Keys.parse(KEY)
    authorizer = Authorizer(keys, clock, RULES)
    signed = sign(Claims(Capability.LIST, pb.LabelSelector(), clock.now(), clock.now() + 60), keys)
    context = _Context((("authorization", f"Bearer {signed}"),))
    with pytest.raises(TimeoutError):
        async with authorizer.admitted("List", context):
            raise TimeoutError
    clock.advance(60 + LEEWAY_SECONDS - 0.01)
    with pytest.raises(TokenExpired):
        async with authorizer.admitted("List", context):
            await asyncio.Event().wait()
    with pytest.raises(KeyError):
        async with Authorizer(None, SystemClock(), RULES).admitted("NewMethod", context):
            raise AssertionError


def test_refusals_have_their_codes() -> None:
    assert code_of(Unauthenticated("")) is UNKNOWN
    assert code_of(PermissionDenied("")) is DENIED


# -- Clients -----------------------------------------------------------------------------------------------------------


async def use(client: JournalClient, spec: pb.JournalSpec) -> None:
    """Call everything that a client can do."""
    await client.apply([upsert(spec, 0)])
    appended = await client.append(spec.name, b"content")
    assert appended.end == 7
    assert await client.read_all(spec.name, 0, 7) == b"content"
    assert await client.head(spec.name) == 7
    assert len(await client.fragments(spec.name)) == 1
    assert [info.spec.name for info in (await client.list(f"name={spec.name}")).journals] == [spec.name]
    await client.apply([delete(spec.name)])


async def test_a_client_signs_each_call_with_the_least_scope(
    secured: BrokerSettings, journal: pb.JournalSpec, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[Capability, str] = {}
    original = Authorizer.claims_of

    def recording(self: Authorizer, token: str | None, capability: Capability) -> Claims:
        claims = original(self, token, capability)
        seen[claims.capability] = labels.format_selector(claims.selector)
        return claims

    async with running(secured, journal) as calls:
        monkeypatch.setattr(Authorizer, "claims_of", recording)
        async with JournalClient(f"127.0.0.1:{port_of(calls)}", auth=Keys.parse(KEY)) as client:
            await use(client, spec("test/other"))
        scope = "name=test/other"
        assert seen == dict.fromkeys((Capability.LIST, Capability.APPLY, Capability.READ, Capability.APPEND), scope)


def port_of(calls: Calls) -> int:
    return int(calls._process.endpoint.rpartition(":")[2])


async def test_a_client_with_a_given_token(secured: BrokerSettings, journal: pb.JournalSpec) -> None:
    async with running(secured, journal) as calls:
        endpoint = f"127.0.0.1:{port_of(calls)}"
        given = token(Capability.LIST | Capability.READ, "team=b")[0][1].removeprefix("Bearer ")
        async with JournalClient(endpoint, auth=BearerToken(Secret(given))) as client:
            assert not (await client.list()).journals
            with pytest.raises(JournalNotFound):
                await client.head(J)
            with pytest.raises(PermissionDenied, match="APPEND") as denied:
                await client.append(J, b"x")
        async with JournalClient(endpoint, auth=Keys.parse(FOREIGN)) as client:
            with pytest.raises(Unauthenticated, match="signature"):
                await client.append(J, b"x")
        async with JournalClient(endpoint) as client:
            with pytest.raises(Unauthenticated, match="a token is needed"):
                await client.list()
        assert given not in str(denied.value)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificates:
    """PEM files of one authority: its own, a server's for this machine, and a client's."""

    folder: Path
    authority: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        folder.mkdir()
        made = cls(folder, trustme.CA(key_type=trustme.KeyType.ECDSA))
        made.authority.cert_pem.write_to_path(made.ca)
        made.issue("server", "127.0.0.1", "localhost")
        made.issue("client", "client@example")
        return made

    def issue(self, name: str, *identities: str) -> None:
        issued = self.authority.issue_cert(*identities, key_type=trustme.KeyType.ECDSA)
        issued.private_key_pem.write_to_path(self.key(name))
        self.cert(name).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def cert(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    @property
    def served(self) -> dict[str, Any]:
        """Return settings of a broker that serves with these certificates."""
        return {"tls_cert": self.cert("server"), "tls_key": self.key("server"), "peer_ca": self.ca}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path / "certificates")


async def lists(endpoint: str, tls: ClientTls | None, keys: str = "") -> bool:
    auth = Keys.parse(keys) if keys else None
    async with JournalClient(endpoint, retry_timeout=0.0, auth=auth, tls=tls) as client:
        try:
            await client.list()
        except Unavailable:
            return False
        return True


async def test_tls(broker_settings: BrokerSettings, certificates: Certificates, tmp_path: Path) -> None:
    settings = broker_settings.model_copy(update={**certificates.served, "auth_keys": SecretStr(KEY)})
    foreign = Certificates.make(tmp_path / "foreign")
    async with BrokerProcess(settings) as process:
        assert process.endpoint.startswith("https://127.0.0.1:")
        trusting = ClientTls(ca=certificates.ca)
        assert await lists(process.endpoint, trusting, KEY)
        assert not await lists(process.endpoint, ClientTls(ca=foreign.ca), KEY)
        assert not await lists(process.endpoint, None, KEY)
        assert not await lists(process.endpoint.replace("https", "http"), None)
        # The name is verified: this one is missing from the certificate.
        assert not await lists(process.endpoint.replace("127.0.0.1", "127.0.0.2"), trusting, KEY)
        with pytest.raises(Unauthenticated):
            await lists(process.endpoint, trusting)


async def test_mutual_tls(broker_settings: BrokerSettings, certificates: Certificates, tmp_path: Path) -> None:
    settings = broker_settings.model_copy(update={**certificates.served, "tls_client_ca": certificates.ca})
    foreign = Certificates.make(tmp_path / "foreign")
    async with BrokerProcess(settings) as process:
        for shown, accepted in [(certificates, True), (foreign, False)]:
            tls = ClientTls(certificates.ca, shown.cert("client"), shown.key("client"))
            assert await lists(process.endpoint, tls) is accepted
        assert not await lists(process.endpoint, ClientTls(certificates.ca))


async def test_old_protocol_versions_are_refused(broker_settings: BrokerSettings, certificates: Certificates) -> None:
    settings = broker_settings.model_copy(update=certificates.served)
    async with BrokerProcess(settings) as process:
        port = int(process.endpoint.rpartition(":")[2])

        async def negotiate(version: ssl.TLSVersion) -> str | None:
            context = ssl.create_default_context(cafile=str(certificates.ca))
            context.set_alpn_protocols(["h2"])
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            try:
                return str(writer.get_extra_info("ssl_object").version())
            finally:
                writer.transport.abort()

        assert await negotiate(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        assert await negotiate(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        with pytest.raises((ssl.SSLError, ConnectionError)), pytest.warns(DeprecationWarning, match="TLSv1_1"):
            await negotiate(ssl.TLSVersion.TLSv1_1)


async def test_changed_certificates_are_loaded(
    broker_settings: BrokerSettings, certificates: Certificates, tmp_path: Path
) -> None:
    settings = broker_settings.model_copy(update=certificates.served)
    later = Certificates.make(tmp_path / "later")
    async with BrokerProcess(settings) as process:
        assert await lists(process.endpoint, ClientTls(certificates.ca))
        certificates.cert("server").write_bytes(b"half a file")
        assert await lists(process.endpoint, ClientTls(certificates.ca))  # The last valid ones stay.
        certificates.key("server").write_bytes(later.key("server").read_bytes())
        certificates.cert("server").write_bytes(later.cert("server").read_bytes())
        assert await lists(process.endpoint, ClientTls(later.ca))
        assert not await lists(process.endpoint, ClientTls(certificates.ca))


async def test_brokers_replicate_and_proxy_with_tokens_over_mutual_tls(
    broker_settings: BrokerSettings, certificates: Certificates, spec: MakeSpec
) -> None:
    """Each journal has two of three brokers: some calls to each broker are proxied, and all appends replicated."""
    common = {**certificates.served, "tls_client_ca": certificates.ca, "auth_keys": SecretStr(KEY)}
    tls = ClientTls(certificates.ca, certificates.cert("client"), certificates.key("client"))
    async with contextlib.AsyncExitStack() as stack:
        brokers = []
        for number in range(3):
            own = {"id": f"broker-{number}", "data_dir": broker_settings.data_dir / str(number)}
            settings = broker_settings.model_copy(update={**common, **own})
            brokers.append(await stack.enter_async_context(BrokerProcess(settings)))
        clients = [
            await stack.enter_async_context(
                JournalClient.of(ClientConfig(broker.endpoint, auth=Keys.parse(KEY), tls=tls))
            )
            for broker in brokers
        ]
        replicated = spec("test/other")
        replicated.replication = 2
        await clients[0].apply([upsert(replicated, 0)])
        end = 0
        for client in clients:
            await eventually(functools.partial(is_listed, client, "test/other"))
            appended = await client.append("test/other", b"content")
            assert appended.begin == end
            end = appended.end
        for client in clients:
            assert await client.read_all("test/other", 0, end) == b"content" * 3
            assert await client.fragments("test/other")


async def is_listed(client: JournalClient, journal: str) -> bool:
    return bool((await client.list(f"name={journal}")).journals)


async def test_a_peer_without_the_key_cannot_replicate(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number, key in enumerate((KEY, FOREIGN)):
            own = {"id": f"broker-{number}", "data_dir": broker_settings.data_dir / str(number)}
            settings = broker_settings.model_copy(update={**own, "auth_keys": SecretStr(key)})
            process = await stack.enter_async_context(BrokerProcess(settings))
        config = ClientConfig(process.endpoint, auth=Keys.parse(FOREIGN))
        client = await stack.enter_async_context(JournalClient.of(config))
        replicated = spec("test/other")
        replicated.replication = 2
        await client.apply([upsert(replicated, 0)])
        with pytest.raises(CorantoError):
            await client.append("test/other", b"content", retry_timeout=0.5)


# -- Settings ----------------------------------------------------------------------------------------------------------


def test_keys_come_from_the_environment_and_are_never_shown(
    monkeypatch: pytest.MonkeyPatch, certificates: Certificates
) -> None:
    monkeypatch.setenv("CORANTO_BROKER_AUTH_KEYS", f"{KEY}, {SECOND}")
    monkeypatch.setenv("CORANTO_BROKER_TLS_CERT", str(certificates.cert("server")))
    settings = BrokerSettings()
    keys = keys_of(settings)
    assert keys == Keys.parse(f"{KEY} {SECOND}")
    assert settings.tls_cert == certificates.cert("server")
    for shown in (repr(settings), str(settings), settings.model_dump_json(), repr(keys)):
        assert KEY not in shown
        assert SECOND not in shown
    assert keys_of(BrokerSettings(auth_keys=SecretStr(" "))) is None
    with pytest.raises(InvalidInput) as caught:
        keys_of(BrokerSettings(auth_keys=SecretStr(f"{KEY[:-2]},{KEY}")))
    assert KEY[:-2] not in str(caught.value)


def test_inconsistent_tls_settings_are_refused(certificates: Certificates, tmp_path: Path) -> None:
    served = certificates.served
    assert server_credentials(BrokerSettings()) is None
    for missing in ("tls_cert", "tls_key"):
        with pytest.raises(InvalidInput, match="both tls_cert and tls_key"):
            server_credentials(BrokerSettings(**(served | {missing: None})))
    with pytest.raises(InvalidInput, match="both tls_cert and tls_key"):
        server_credentials(BrokerSettings(tls_client_ca=certificates.ca))
    with pytest.raises(InvalidInput, match="cannot be read"):
        server_credentials(BrokerSettings(**(served | {"tls_key": tmp_path / "none"})))
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidInput, match="not a PEM file"):
        server_credentials(BrokerSettings(**(served | {"peer_ca": tmp_path / "empty"})))
    with pytest.raises(InvalidInput, match="together"):
        server_credentials(BrokerSettings(**served, peer_cert=certificates.cert("client")))


def test_a_broker_presents_its_certificate_to_peers_that_require_one(certificates: Certificates) -> None:
    served = certificates.served
    assert peer_tls(BrokerSettings(**served)) == ClientTls(certificates.ca)
    mutual = BrokerSettings(**served, tls_client_ca=certificates.ca)
    assert peer_tls(mutual) == ClientTls(certificates.ca, certificates.cert("server"), certificates.key("server"))
    shown: dict[str, Any] = {"peer_cert": certificates.cert("client"), "peer_key": certificates.key("client")}
    other = BrokerSettings(**served, **shown, tls_client_ca=certificates.ca)
    assert peer_tls(other) == ClientTls(certificates.ca, certificates.cert("client"), certificates.key("client"))


check = functools.partial(check_exposure, harm="do harm")


@pytest.mark.parametrize(
    ("settings", "endpoint", "problem"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:1", ""),
        ({"host": "127.0.0.1"}, "https://proxy.example", ""),
        ({"host": "0.0.0.0"}, "http://10.0.0.1:1", "in the clear"),
        ({"host": "10.0.0.1"}, "https://proxy.example", "in the clear"),
        ({"host": "127.0.0.1"}, "http://proxy.example", "use https"),
        ({"host": "0.0.0.0", "tls_cert": Path("/c")}, "https://10.0.0.1:1", ""),
        ({"host": "0.0.0.0", "tls_cert": Path("/c")}, "http://10.0.0.1:1", "use https"),
    ],
)
def test_where_a_broker_with_keys_may_listen(settings: dict[str, Any], endpoint: str, problem: str) -> None:
    beyond = settings["host"] != "127.0.0.1"
    with contextlib.ExitStack() as stack:
        if beyond:
            stack.enter_context(pytest.raises(InvalidInput, match="serve-anyone-without-keys"))
        check(BrokerSettings(**settings), endpoint)
    with structlog.testing.capture_logs() as logs:
        check(BrokerSettings(**settings, serve_anyone_without_keys=True), endpoint)  # It may, and logs a warning.
        assert bool(logs) is beyond
        logs.clear()
        check(BrokerSettings(**settings, tls_client_ca=Path("/ca")), endpoint)  # Certificates are sufficient.
        assert logs == []
    keyed = BrokerSettings(**settings, auth_keys=SecretStr(KEY))
    if problem:
        with pytest.raises(InvalidInput, match=problem):
            check(keyed, endpoint)
    else:
        check(keyed, endpoint)


def test_accepting_requests_without_a_token_logs_a_warning() -> None:
    with structlog.testing.capture_logs() as logs:
        check(BrokerSettings(auth_keys=SecretStr(f"{KEY},AA==")), "http://127.0.0.1:1")
    assert any(entry["event"] == "security.missing_tokens_accepted" for entry in logs)
