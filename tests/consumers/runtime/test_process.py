"""Consumer processes with etcd: assignment, service, handover and status of shards."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import trustme

from coranto.client import ClientConfig
from coranto.effects import SystemClock
from coranto.errors import Fenced, InvalidInput, RpcFailed, SqlStoreError, Unavailable
from coranto.labels import label_selector, label_set
from coranto.messages import Checkpoint, Source
from coranto.messages.checkpoints import SourceReset
from coranto.security.call_tokens import CallTokens
from coranto.security.oidc.client import OidcClient
from coranto.security.tls import ClientTls
from coranto.security.tokens import BearerToken, Capability, Keys, Secret
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.positions.moves import Move, apply_moves
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.peers import ShardPeers
from coranto_consumers.runtime.process import ConsumerProcess
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.replica import FENCINGS
from coranto_consumers.runtime.testing import shard_spec
from coranto_consumers.stores.changing import change_checkpoint
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore
from tests.servers.oidc import CLIENT, SECRET, oidc_server

KEY = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHMsIGxvbmcgZW5vdWdo"


@pytest.fixture
def store_url(tmp_path: Any) -> str:
    """These tests need only one kind of store."""
    return f"sqlite:///{tmp_path}/store.db"


def spec(**fields: Any) -> pc.ShardSpec:
    """A spec with transactions that end when there is nothing more to read, at any speed of the machine."""
    return shard_spec("shard-sums", ["in/one"], max_seconds=600, **fields)


async def test_an_applied_shard_is_assigned_and_reports_its_progress(journals, consumer, sums):
    process = await consumer.start(sums)
    response = await consumer.apply(process, spec(labels=label_set({"app": "sums"})))
    assert response.status == pc.OK
    head = await journals.publish("in/one", {"key": "a", "n": 1})

    found = await consumer.stat(process, one=head)
    assert found.status == pc.OK
    assert found.read_through == {"in/one": head}
    assert found.publish_at == {"out/one": journals.head("out/one")}
    assert sums.sums() == {"a": (1, 1)}

    await consumer.status(process, "PRIMARY")
    shard = await consumer.shard(process)
    assert shard.spec == spec(labels=label_set({"app": "sums"}))
    assert shard.mod_revision == response.header.etcd.revision
    assert list(shard.route.endpoints) == [process.endpoint]
    assert [each.code for each in shard.status] == [pc.ReplicaStatus.PRIMARY]
    for selector, count in (({"app": "sums"}, 1), ({"app": "others"}, 0), ({"id": "shard-sums"}, 1)):
        listed = await consumer.stub(process).List(pc.ListRequest(selector=label_selector(include=selector)))
        assert len(listed.shards) == count


async def test_stat_waits_until_written_messages_are_read(journals, consumer, sums):
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)

    waiting = asyncio.create_task(consumer.stat(process, one=head + 1, elsewhere=1000))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    assert (await waiting).read_through == {"in/one": head}


async def test_any_process_answers_for_the_primary(journals, consumer, sums):
    first, second = await consumer.start(sums), await consumer.start(sums, "process-b")
    await consumer.apply(first, spec())
    await consumer.status(first, "PRIMARY")
    head = await journals.publish("in/one", {"key": "a", "n": 1})

    for process in (first, second):
        response = await consumer.stat(process, one=head)
        assert response.read_through == {"in/one": head}
        assert response.header.process_id.suffix == (await consumer.shard(first)).route.members[0].suffix


async def test_hot_standbys_are_ready_and_take_over(journals, consumer, sums):
    first = await consumer.start(sums, zone="zone-a")
    second = await consumer.start(sums, "process-b", zone="zone-b")
    await consumer.apply(first, spec(hot_standbys=1))
    await consumer.status(first, "PRIMARY", "STANDBY")
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(first, one=head)

    primary = next(each for each in first.keyspace.state.assignments("shard-sums") if each.slot == 0).member
    leaving, staying = (first, second) if primary == first.member else (second, first)
    await leaving.exit_gracefully()
    await leaving.session.close()
    await consumer.status(staying, "PRIMARY")
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    await consumer.stat(staying, one=head)
    assert sums.sums() == {"a": (3, 2)}
    assert [each["n"] for each in journals.committed("out/one")] == [1, 2]


async def test_an_exiting_process_releases_its_shards_to_another(journals, consumer, sums):
    first = await consumer.start(sums)
    await consumer.apply(first, spec())
    await consumer.status(first, "PRIMARY")
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(first, one=head)
    second = await consumer.start(sums, "process-b")
    await first.keyspace.wait_until(lambda state: len(state.members) == 2, timeout=120)

    stop = asyncio.Event()
    stop.set()
    assert await first.serve_until(stop) == 0
    assert first.keyspace.state.by_member.keys() == {second.member}
    await consumer.status(second, "PRIMARY")
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    await consumer.stat(second, one=head)
    assert sums.sums() == {"a": (3, 2)}


async def test_a_shard_continues_once_brokers_with_the_journals_end_are_back(journals, consumer, sums):
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    await consumer.status(process, "PRIMARY")
    out = journals.fake.journals["out/one"]
    out.index_end = 1000
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    async with asyncio.timeout(120):
        while restarts(process) < 7:  # noqa: ASYNC110 - there is no event for a metric
            await asyncio.sleep(0.01)
    assert (await consumer.shard(process)).status[0].code == pc.ReplicaStatus.PRIMARY
    out.index_end = 0
    await consumer.stat(process, one=head)
    assert sums.sums() == {"a": (1, 1)}
    assert [each["n"] for each in journals.committed("out/one")] == [1]


def restarts(process: ConsumerProcess) -> float:
    return process.metrics.registry.get_sample_value("coranto_shard_restarts_total", {"shard": "shard-sums"}) or 0.0


async def test_a_failed_shard_reports_its_error_until_it_is_unassigned(journals, consumer, sums):
    def fail(message: dict) -> None:
        raise ZeroDivisionError("boom")

    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    sums.before = fail
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    assert (await consumer.stat(process, one=head)).status == pc.SHARD_STOPPED
    await consumer.status(process, "FAILED")
    assert list((await consumer.shard(process)).status[0].errors) == ["ZeroDivisionError: boom"]

    sums.before = lambda message: None
    stub = consumer.stub(process)
    tried = await stub.Unassign(pc.UnassignRequest(shards=["shard-sums"], only_failed=True, dry_run=True))
    assert list(tried.shards) == ["shard-sums"]
    assert (await consumer.shard(process)).status[0].code == pc.ReplicaStatus.FAILED
    done = await stub.Unassign(pc.UnassignRequest(shards=["shard-sums"], only_failed=True))
    assert (done.status, list(done.shards)) == (pc.OK, ["shard-sums"])
    await consumer.status(process, "PRIMARY")
    await consumer.stat(process, one=head)
    assert sums.sums() == {"a": (1, 1)}
    assert not (await stub.Unassign(pc.UnassignRequest(shards=["shard-sums"], only_failed=True))).shards
    assert list((await stub.Unassign(pc.UnassignRequest(shards=["shard-sums"]))).shards) == ["shard-sums"]
    await consumer.status(process, "PRIMARY")


async def test_a_transient_error_restarts_the_shard(journals, consumer, sums):
    failures = [SqlStoreError("the database went away"), SqlStoreError("and once more")]

    def fail(message: dict) -> None:
        if failures:
            raise failures.pop()

    sums.before = fail
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    assert (await consumer.stat(process, one=head)).status == pc.OK
    assert sums.sums() == {"a": (1, 1)}
    assert [each["n"] for each in journals.committed("out/one")] == [1]
    assert sums.database.read(f"{consumer.settings.etcd_prefix}/items/shard-sums").fence == 3


async def test_a_late_fence_of_a_former_owner_does_not_take_the_shard(journals, consumer, sums):
    """The former owner hung before it restored the checkpoint, and continued after another process had the shard."""
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)
    fqn = f"{consumer.settings.etcd_prefix}/items/shard-sums"
    late = sums.database.raise_fence(fqn).fence
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    assert (await consumer.stat(process, one=head)).status == pc.OK
    await consumer.status(process, "PRIMARY")
    assert sums.sums() == {"a": (3, 2)}
    assert [each["n"] for each in journals.committed("out/one")] == [1, 2]
    with pytest.raises(Fenced), sums.database.transaction(fqn, late):
        pytest.fail("the former owner was not fenced off")


async def test_an_assigned_shard_restarts_after_any_number_of_resets(journals, consumer, sums, store_url, monkeypatch):
    """Each reset fences off the idle shard, which restarts at its new position."""
    monkeypatch.setattr("coranto_consumers.runtime.primary.FENCE_SECONDS", 0.01)
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)
    fqn = f"{consumer.settings.etcd_prefix}/items/shard-sums"
    (replica,) = process.consumer.resolver.replicas
    for number in range(1, FENCINGS + 2):
        known = (await asyncio.to_thread(sums.database.read, fqn)).checkpoint.sources["in/one"]
        move = Move("in/one", known, Source(0, journal_id=known.journal_id))
        await asyncio.to_thread(change_checkpoint, store_url, fqn, apply_moves([move]))
        async with asyncio.timeout(120):
            # In a thread: the shard's transaction holds the database lock and needs this loop.
            while await asyncio.to_thread(sums.sums) != {"a": (number + 1, number + 1)}:
                assert not replica.stopped.is_set()
        assert (await consumer.stat(process, one=head)).status == pc.OK
    await consumer.status(process, "PRIMARY")


async def test_progress_moves_back_only_with_a_reset(journals):
    progress = Progress()
    progress.advance({"in/one": 10}, {})
    progress.advance({"in/one": 5}, {})
    reset = SourceReset("in/one", 10, 0, 2, 1.0)
    progress.restored(())
    assert progress.read_through == {"in/one": 10}
    progress.restored([reset])
    assert progress.read_through == {}
    progress.advance({"in/one": 3}, {})
    progress.restored([reset])
    assert progress.read_through == {"in/one": 3}


async def test_a_process_without_the_assignment_stops_a_fenced_shard(journals, consumer, sums):
    """Only etcd has the new assignment: the process hung, and has an old view."""
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)
    (replica,) = process.consumer.resolver.replicas
    mine = process.consumer.assignment_of("shard-sums")
    process.consumer.assignment_of = lambda shard: replace(mine, create_revision=mine.create_revision - 1)
    owner = sums.database.raise_fence(f"{consumer.settings.etcd_prefix}/items/shard-sums").fence
    await journals.publish("in/one", {"key": "a", "n": 2})
    async with asyncio.timeout(120):
        await replica.stopped.wait()
    assert sums.database.read(f"{consumer.settings.etcd_prefix}/items/shard-sums").fence == owner
    assert sums.sums() == {"a": (1, 1)}


async def test_changed_sources_are_consumed(journals, consumer, sums):
    process = await consumer.start(sums)
    revision = (await consumer.apply(process, spec())).header.etcd.revision
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)
    other = await journals.publish("in/two", {"key": "a", "n": 2})

    both = shard_spec("shard-sums", ["in/one", "in/two"])
    assert (await consumer.apply(process, both, revision=revision)).status == pc.OK
    assert (await consumer.stat(process, one=head, two=other)).status == pc.OK
    assert sums.sums() == {"a": (3, 2)}


async def test_disabled_and_deleted_shards_are_not_processed(consumer, sums):
    process = await consumer.start(sums)
    revision = (await consumer.apply(process, spec())).header.etcd.revision
    await consumer.status(process, "PRIMARY")
    disabled = await consumer.apply(process, spec(disable=True), revision=revision)
    await process.keyspace.wait_until(lambda state: not state.assignments("shard-sums"), timeout=120)
    assert not process.consumer.resolver.replicas

    change = pc.ApplyRequest.Change(delete="shard-sums", expect_mod_revision=disabled.header.etcd.revision)
    assert (await consumer.stub(process).Apply(pc.ApplyRequest(changes=[change]))).status == pc.OK
    response = await consumer.stub(process).Stat(pc.StatRequest(shard="shard-sums"))
    assert response.status == pc.SHARD_NOT_FOUND


async def test_invalid_changes_are_refused(consumer, sums):
    process = await consumer.start(sums)
    assert (await consumer.apply(process, spec(), revision=17)).status == pc.ETCD_TRANSACTION_FAILED
    bad = spec()
    bad.max_txn_duration.FromSeconds(0)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await consumer.apply(process, bad)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "changes[0].upsert.max_txn_duration" in refusal.value.details()


async def test_tokens_limit_actions_on_shards(consumer, sums):
    process = await consumer.start(sums, auth_keys=KEY)
    stub = consumer.stub(process)
    clock = SystemClock()

    async def call(method: str, request: Any, capability: Capability, **scope: str) -> Any:
        tokens = CallTokens(Keys.parse(KEY), clock)
        return await getattr(stub, method)(
            request, metadata=tokens.for_selector(capability, label_selector(include=scope))
        )

    async def refused(code: grpc.StatusCode, work: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await work
        assert refusal.value.code() is code

    change = pc.ApplyRequest.Change(upsert=spec(labels=label_set({"team": "blue"})))
    request = pc.ApplyRequest(changes=[change])
    await refused(grpc.StatusCode.UNAUTHENTICATED, stub.List(pc.ListRequest()))
    await refused(grpc.StatusCode.PERMISSION_DENIED, call("Apply", request, Capability.LIST))
    await refused(grpc.StatusCode.PERMISSION_DENIED, call("Apply", request, Capability.APPLY, team="red"))
    assert (await call("Apply", request, Capability.APPLY, team="blue")).status == pc.OK

    seen = await call("List", pc.ListRequest(), Capability.LIST, team="blue")
    assert [shard.spec.id for shard in seen.shards] == ["shard-sums"]
    assert not (await call("List", pc.ListRequest(), Capability.LIST, team="red")).shards
    hidden = await call("Stat", pc.StatRequest(shard="shard-sums"), Capability.READ, team="red")
    assert hidden.status == pc.SHARD_NOT_FOUND
    await refused(
        grpc.StatusCode.INVALID_ARGUMENT,
        call("Unassign", pc.UnassignRequest(shards=["shard-sums"]), Capability.APPLY, team="red"),
    )


async def test_tokens_of_a_provider_limit_actions_on_shards(consumer, sums, tmp_path):
    with oidc_server() as oidc:
        file = tmp_path / "provider.toml"
        file.write_text(
            f"""
issuer = "{oidc.issuer}"
audience = "coranto"
[[grants]]
when = {{ groups = "blue" }}
capabilities = ["LIST", "READ", "APPLY"]
selector = "team=blue"
"""
        )
        process = await consumer.start(sums, auth_keys=KEY, oidc=file)
        oidc.token_claims = {"groups": ["blue"]}
        auth = OidcClient(oidc.issuer, CLIENT, Secret(SECRET))
        async with ShardClient(ClientConfig(process.endpoint, auth=auth)) as client:
            while True:  # Retry until the process has fetched the provider's keys.
                try:
                    await client.apply([pc.ApplyRequest.Change(upsert=spec(labels=label_set({"team": "blue"})))])
                    break
                except Unavailable:
                    await asyncio.sleep(0.01)
            assert [shard.spec.id for shard in await client.list()] == ["shard-sums"]
            with pytest.raises(RpcFailed, match="PERMISSION_DENIED"):
                await client.apply([pc.ApplyRequest.Change(upsert=shard_spec("shard-more", ["in/one"]))])
        stranger = BearerToken(Secret(oidc.token(groups=["blue"], aud="other")))
        async with ShardClient(ClientConfig(process.endpoint, auth=stranger)) as client:
            with pytest.raises(RpcFailed, match="UNAUTHENTICATED"):
                await client.list()


async def test_a_missing_permission_is_reported_for_any_request(consumer, sums):
    """Malformed requests and requests for missing shards get the same answer as valid ones."""
    process = await consumer.start(sums, auth_keys=KEY)
    stub = consumer.stub(process)
    tokens = CallTokens(Keys.parse(KEY), SystemClock())
    everything, other_team = (
        tokens.for_selector(Capability.ALL, scope)
        for scope in (label_selector(), label_selector(include={"team": "red"}))
    )
    excluding = tokens.for_selector(Capability.ALL, label_selector(exclude={"team": "blue"}))

    async def apply(metadata: Any, change: pc.ApplyRequest.Change) -> Any:
        try:
            return (await stub.Apply(pc.ApplyRequest(changes=[change]), metadata=metadata)).status
        except grpc.aio.AioRpcError as error:
            return error.code()

    upsert = pc.ApplyRequest.Change(upsert=spec(labels=label_set({"team": "blue"})))
    assert await apply(everything, upsert) == pc.OK
    bad = spec(labels=label_set({"team": "blue"}))
    bad.hint_backups = 1 << 30
    for change in (
        pc.ApplyRequest.Change(upsert=bad, expect_mod_revision=-7),
        pc.ApplyRequest.Change(delete="shard-sums"),
        pc.ApplyRequest.Change(delete="shard-sums", expect_mod_revision=-1),
        pc.ApplyRequest.Change(delete="no-such-shard", expect_mod_revision=-1),
        pc.ApplyRequest.Change(delete="x", expect_mod_revision=-1),
        pc.ApplyRequest.Change(),
    ):
        assert await apply(other_team, change) is grpc.StatusCode.PERMISSION_DENIED
    assert (
        await apply(excluding, pc.ApplyRequest.Change(delete="shard-sums", expect_mod_revision=-1))
        is grpc.StatusCode.PERMISSION_DENIED
    )
    assert await apply(everything, pc.ApplyRequest.Change(upsert=bad)) is grpc.StatusCode.INVALID_ARGUMENT
    for shard in ("shard-sums", "no-such-shard", "x", "a" * 3000):
        request = pc.StatRequest(shard=shard, read_through={"in/one": -5})
        assert (await stub.Stat(request, metadata=other_team)).status == pc.SHARD_NOT_FOUND
        assert (await stub.GetHints(pc.GetHintsRequest(shard=shard), metadata=other_team)).status == pc.SHARD_NOT_FOUND


async def test_peers_proxy_with_tokens_and_tls(journals, consumer, sums, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    tls = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem", "peer_ca": tmp_path / "ca.pem"}
    processes = [await consumer.start(sums, f"process-{name}", auth_keys=KEY, **tls) for name in "ab"]
    assert all(process.endpoint.startswith("https://") for process in processes)
    tokens = CallTokens(Keys.parse(KEY), SystemClock()).for_selector(Capability.ALL, label_selector())
    peers = ShardPeers(ClientTls(tmp_path / "ca.pem"))
    try:
        stubs = [peers.stub(process.endpoint) for process in processes]
        await stubs[0].Apply(pc.ApplyRequest(changes=[pc.ApplyRequest.Change(upsert=spec())]), metadata=tokens)
        await consumer.status(processes[0], "PRIMARY")
        head = await journals.publish("in/one", {"key": "a", "n": 1})
        for stub in stubs:
            request = pc.StatRequest(shard="shard-sums", read_through={"in/one": head})
            assert (await stub.Stat(request, metadata=tokens)).read_through == {"in/one": head}
    finally:
        await peers.close()


async def test_a_process_refuses_to_serve_other_hosts_without_protection(consumer, sums):
    with pytest.raises(InvalidInput, match="could change shards"):
        await consumer.start(sums, host="0.0.0.0")
    with pytest.raises(InvalidInput, match="in the clear"):
        await consumer.start(sums, host="0.0.0.0", auth_keys=KEY)
    with pytest.raises(InvalidInput, match="both tls_cert and tls_key"):
        await consumer.start(sums, tls_cert="cert.pem")


async def test_metrics_describe_shards(journals, consumer, sums):
    process = await consumer.start(sums, metrics_port=0)
    await consumer.apply(process, spec())
    head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "a", "n": 2})
    await consumer.stat(process, one=head)
    await consumer.status(process, "PRIMARY")

    def scrape(path: str = "metrics") -> str:
        with urllib.request.urlopen(f"{process.metrics_endpoint}/{path}", timeout=60) as response:
            return response.read().decode()

    assert json.loads(await asyncio.to_thread(scrape, "ready"))["ready"] is True
    text = await asyncio.to_thread(scrape)
    assert 'coranto_shard_status{shard="shard-sums"} 300.0' in text
    assert 'coranto_shard_messages_total{shard="shard-sums"} 2.0' in text
    assert f'coranto_shard_read_through{{journal="in/one",shard="shard-sums"}} {float(head)}' in text

    await consumer.apply(process, shard_spec("shard-other", ["in/two"]))
    await consumer.status(process, "PRIMARY", id="shard-other")
    delete = pc.ApplyRequest.Change(delete="shard-sums", expect_mod_revision=-1)
    assert (await consumer.stub(process).Apply(pc.ApplyRequest(changes=[delete]))).status == pc.OK
    async with asyncio.timeout(60):
        while 'shard="shard-sums"' in (text := await asyncio.to_thread(scrape)):
            pass
    assert 'coranto_shard_status{shard="shard-other"} 300.0' in text


async def test_two_shards_share_a_store(journals, consumer, sums):
    assert isinstance(sums.database, SqlStore)
    process = await consumer.start(sums)
    await consumer.apply(process, shard_spec("shard-one", ["in/one"]), shard_spec("shard-two", ["in/two"]))
    first = await journals.publish("in/one", *({"key": "a", "n": 1} for _ in range(20)))
    second = await journals.publish("in/two", *({"key": "b", "n": 2} for _ in range(20)))
    await consumer.stat(process, "shard-one", one=first)
    await consumer.stat(process, "shard-two", two=second)
    assert sums.sums() == {"a": (20, 20), "b": (40, 20)}


async def test_stores_identify_shards_as_gazette_does(journals, consumer, sums):
    """A shard of a Go consumer is resumed. A shard of another consumer with the same id in the database is kept."""
    fqn = f"{consumer.settings.etcd_prefix}/items/shard-sums"
    first = await journals.publish("in/one", {"key": "a", "n": 1})
    sums.database.create_tables()
    with sums.database.engine.begin() as connection:
        row = {"fence": 4, "checkpoint": Checkpoint({"in/one": Source(first)}).to_bytes()}
        connection.execute(
            CHECKPOINTS.insert(), [{"shard_fqn": fqn, **row}, {"shard_fqn": "/other/items/shard-sums", **row}]
        )
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    await consumer.stat(process, one=await journals.publish("in/one", {"key": "a", "n": 2}))

    assert sums.sums() == {"a": (2, 1)}
    assert sums.database.read(fqn).fence == 5
    assert sums.database.read("/other/items/shard-sums").fence == 4
