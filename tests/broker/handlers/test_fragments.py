"""Stored, listed and signed fragments."""

from __future__ import annotations

import gzip
import hashlib
from typing import Any

import grpc
import grpc.aio
import pytest

from coranto.errors import StoreDenied
from coranto.fragments.fragment import Codec
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.handlers.rpcs import MakeSpec, Running, failure
from tests.broker.running import RawClient, create, eventually, stored_files

J = "test/journal"


# --------------------------------------------------------------------------------- fragments, stores and persistence


async def test_fragments_are_stored_by_name_length_and_sum(
    client: RawClient, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    fragment = {"length": 1024, "compression_codec": pb.GZIP, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    whole = b""
    for n in range(5):
        content = bytes([n]) * 1000
        response = await client.append(J, content)
        assert response.status == pb.OK
        whole += content
    # The journal's first append is a separate fragment; then each fragment is completed by the append that finds it too
    # long.
    await eventually(lambda: len(stored_files(broker_settings)) == 2)
    files = stored_files(broker_settings)
    assert [(f.begin, f.end, f.codec) for f in files.values()] == [(0, 1000, Codec.GZIP), (1000, 3000, Codec.GZIP)]
    for path, fragment_ in files.items():
        content = gzip.decompress(path.read_bytes())
        assert content == whole[fragment_.begin : fragment_.end]
        assert hashlib.sha1(content).digest() == fragment_.sum
    assert await client.content(J) == whole


async def test_stored_fragments_replace_local_files_and_are_still_read(
    broker: Running, broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, client = broker
    fragment = {"length": 1024, "compression_codec": pb.SNAPPY, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    whole = b"".join(bytes([n]) * 1500 for n in range(4))
    for n in range(4):
        await client.append(J, whole[n * 1500 : (n + 1) * 1500])
    index = process.broker.resolver.local_replicas[0].index
    await eventually(lambda: not index.sealed_files() and len(stored_files(broker_settings)) == 3)
    contents = list((broker_settings.data_dir / "spools").rglob("*.content"))
    assert len(contents) == 1, "only the fragment under construction has a file left"

    assert await client.content(J) == whole
    (response,) = await client.read(J, 100, do_not_proxy=True)
    validate(response)
    assert response.fragment.backing_store == "file:///frags/"
    assert response.fragment.mod_time > 0
    assert response.fragment_url.startswith("file:///frags/test/journal/")
    assert not response.content

    async def deny(fragment: object, ttl_seconds: float) -> str:
        raise StoreDenied("you may not sign")

    monkeypatch.setattr(process.broker.stores.get("file:///frags/"), "sign_async", deny)
    assert await client.content(J) == whole
    (response,) = await client.read(J, 100, do_not_proxy=True)
    validate(response)
    assert (response.fragment_url, response.content) == ("", b"")


async def test_changed_content_in_the_store_is_not_served(
    broker: Running, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    fragment = {"length": 1024, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    for _ in range(3):
        await client.append(J, b"x" * 2000)
    index = process.broker.resolver.local_replicas[0].index
    await eventually(lambda: not index.sealed_files() and len(stored_files(broker_settings)) == 2)
    path = next(iter(stored_files(broker_settings)))
    path.write_bytes(b"x" * 1999 + b"y")
    error = await failure(client.read(J))
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert "SHA-1" in str(error.details())


async def test_fragments_stored_since_the_last_listing_are_not_listed_as_a_gap(
    broker: Running, broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto_broker.replication.replica.REFRESH_FOR_GAP_SECONDS", 0.01)
    process, client = broker
    await create(client, spec(stores=("file:///frags/",), fragment={"length": 1024, "refresh_interval": 86400}))
    for _ in range(4):
        await client.append(J, b"x" * 2000)
    (replica,) = process.broker.resolver.local_replicas
    await eventually(lambda: not replica.index.sealed_files() and len(stored_files(broker_settings)) == 3)
    known = [entry.fragment for entry in replica.index.entries if entry.fragment.backing_store]
    for older in (known[:1], known[::2], []):
        replica.index.refresh(older, process.broker.clock.monotonic())
        response = await client.stub.ListFragments(pb.FragmentsRequest(journal=J))
        assert [each.spec.begin for each in response.fragments] == [0, 2000, 4000, 6000]
    lost = next(path for path, fragment in stored_files(broker_settings).items() if fragment.begin == 2000)
    lost.unlink()
    replica.index.refresh(known[:1], process.broker.clock.monotonic())
    response = await client.stub.ListFragments(pb.FragmentsRequest(journal=J))
    assert [each.spec.begin for each in response.fragments] == [0, 4000, 6000], "a real loss is listed"


async def test_list_fragments_pages_and_signs(
    client: RawClient, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    fragment = {"length": 1024, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    for _ in range(4):
        await client.append(J, b"x" * 2000)
    await eventually(lambda: len(stored_files(broker_settings)) == 3)

    async def listed(**parameters: Any) -> pb.FragmentsResponse:
        response = await client.stub.ListFragments(pb.FragmentsRequest(journal=J, **parameters))
        validate(response)
        assert response.status == pb.OK
        return response

    async def three_are_stored() -> bool:
        return sum(bool(each.spec.mod_time) for each in (await listed()).fragments) == 3

    await eventually(three_are_stored)
    everything = await listed()
    assert [(each.spec.begin, each.spec.end) for each in everything.fragments] == [
        (0, 2000),
        (2000, 4000),
        (4000, 6000),
        (6000, 8000),
    ]
    assert everything.next_page_token == 0
    assert not any(each.signed_url for each in everything.fragments)
    page = await listed(page_limit=3)
    assert (len(page.fragments), page.next_page_token) == (3, 6000)
    rest = await listed(next_page_token=page.next_page_token)
    assert [each.spec.begin for each in rest.fragments] == [6000]

    request = pb.FragmentsRequest(journal=J, end_mod_time=1 << 40)
    request.signatureTTL.FromSeconds(60)
    stored = await client.stub.ListFragments(request)
    assert [bool(each.signed_url) for each in stored.fragments] == [True] * 3
    assert not (await listed(begin_mod_time=1, end_mod_time=2)).fragments
    missing = await client.stub.ListFragments(pb.FragmentsRequest(journal="no/such/journal"))
    assert missing.status == pb.JOURNAL_NOT_FOUND


async def test_path_postfixes(client: RawClient, broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    template = 'date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
    fragment = {"length": 1024, "refresh_interval": 1, "path_postfix_template": template}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    await client.append(J, b"x")
    await client.append(J, b"y")
    await eventually(lambda: stored_files(broker_settings))
    (path,) = stored_files(broker_settings)
    assert path.parent.name.startswith("date=20")
