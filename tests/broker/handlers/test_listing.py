"""`List`: selection, many messages, and watches."""

from __future__ import annotations

from coranto import labels
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from tests.broker.handlers.rpcs import MakeSpec
from tests.broker.running import RawClient

J = "test/journal"


async def test_list_of_nothing_has_a_header(client: RawClient) -> None:
    (response,) = await client.listing()
    validate(response)
    assert (response.status, len(response.journals)) == (pb.OK, 0)
    assert response.header.route.primary == -1
    assert response.header.process_id.suffix == "broker-0"


async def test_list_selects_by_labels_names_and_prefixes(client: RawClient, spec: MakeSpec) -> None:
    for name, kind in (("one/aaaa", "x"), ("one/bbbb", "y"), ("two/cccc", "x")):
        await client.apply(spec(name, labels=labels.label_set(kind=kind)))

    async def names(selector: str) -> list[str]:
        (response,) = await client.listing(selector=labels.parse_selector(selector))
        return [journal.spec.name for journal in response.journals]

    assert await names("") == ["one/aaaa", "one/bbbb", "two/cccc"]
    assert await names("kind=x") == ["one/aaaa", "two/cccc"]
    assert await names("kind!=x") == ["one/bbbb"]
    assert await names("name=one/bbbb") == ["one/bbbb"]
    assert await names("name:prefix=one/") == ["one/aaaa", "one/bbbb"]
    assert await names("prefix=one/, kind=y") == ["one/bbbb"]


async def test_a_long_list_is_sent_in_several_messages(client: RawClient, spec: MakeSpec) -> None:
    await client.apply(*[spec(f"many/journal-{n:03d}") for n in range(60)])
    responses = await client.listing()
    assert [len(response.journals) for response in responses] == [25, 25, 10]
    assert responses[0].HasField("header")
    assert not any(response.HasField("header") for response in responses[1:])
    found = [journal.spec.name for response in responses for journal in response.journals]
    assert found == sorted(found)


async def test_watched_list_sends_snapshots_of_changes(client: RawClient, spec: MakeSpec) -> None:
    await client.apply(spec("seen/journal"))
    selector = labels.parse_selector("name:prefix=seen/")
    call = client.stub.List(pb.ListRequest(selector=selector, watch=True))

    async def snapshot() -> list[str]:
        first = await call.read()
        assert isinstance(first, pb.ListResponse)
        assert first.HasField("header")
        assert await call.read() == pb.ListResponse()
        return [journal.spec.name for journal in first.journals]

    assert await snapshot() == ["seen/journal"]
    await client.apply(spec("other/journal"))
    await client.apply(spec("seen/second"))
    assert await snapshot() == ["seen/journal", "seen/second"]
    changes = [pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1) for name in ("seen/journal", "seen/second")]
    await client.stub.Apply(pb.ApplyRequest(changes=changes))
    assert await snapshot() == []
    call.cancel()
