"""`Apply`: changes that are made in full, or refused."""

from __future__ import annotations

import grpc
import grpc.aio

from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from tests.broker.handlers.rpcs import MakeSpec, failure
from tests.broker.running import RawClient

J = "test/journal"


async def test_apply_creates_changes_and_deletes(client: RawClient, spec: MakeSpec) -> None:
    created = await client.apply(spec())
    validate(created)
    (response,) = await client.listing()
    (journal,) = response.journals
    assert journal.spec == spec()
    assert journal.mod_revision == journal.create_revision == created.header.etcd.revision

    # Creating it again, or changing a revision other than the current one, is refused and changes nothing.
    for revision in (0, journal.mod_revision - 1):
        refused = await client.apply(spec(max_append_rate=5), revision=revision)
        assert refused.status == pb.ETCD_TRANSACTION_FAILED
    changed = await client.apply(spec(max_append_rate=7), revision=journal.mod_revision)
    assert changed.status == pb.OK
    forced = await client.apply(spec(max_append_rate=8), revision=-1)
    assert forced.status == pb.OK
    (response,) = await client.listing()
    assert response.journals[0].spec.max_append_rate == 8
    assert response.journals[0].create_revision == journal.create_revision

    delete = pb.ApplyRequest.Change(delete=J, expect_mod_revision=response.journals[0].mod_revision)
    deleted = await client.stub.Apply(pb.ApplyRequest(changes=[delete]))
    assert deleted.status == pb.OK
    (response,) = await client.listing()
    assert not response.journals


async def test_apply_is_all_or_nothing(client: RawClient, spec: MakeSpec) -> None:
    await client.apply(spec("first/journal"))
    refused = await client.apply(spec("second/journal"), spec("first/journal"))
    assert refused.status == pb.ETCD_TRANSACTION_FAILED
    (response,) = await client.listing()
    assert [journal.spec.name for journal in response.journals] == ["first/journal"]


async def test_apply_refuses_invalid_specs(client: RawClient, spec: MakeSpec) -> None:
    error = await failure(client.apply(spec("/rooted/name")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "name" in str(error.details())
    many = [spec(f"many/journal-{n:03d}") for n in range(200)]
    error = await failure(client.apply(*many))
    assert "several batches" in str(error.details())
