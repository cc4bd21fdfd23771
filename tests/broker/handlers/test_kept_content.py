"""Content that is read by its offsets and SHA-1 after all indexes have dropped it."""

from __future__ import annotations

import base64
from typing import Any

from pydantic import SecretStr

from coranto import labels
from coranto.client import JournalClient
from coranto.effects import SystemClock
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.security.tokens import Capability, Claims, Keys, sign
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.handlers.rpcs import MakeSpec
from tests.broker.running import RawClient, create, eventually, running_broker, stored_files

J = "test/journal"
KEY = base64.b64encode(bytes(range(32))).decode()


def fragment(content: bytes, begin: int = 0) -> Fragment:
    return Fragment(J, begin, begin + len(content), sum_of(content), Codec.NONE)


def wanted(content: bytes, begin: int = 0) -> dict[str, Any]:
    return {"offset": begin, "end_offset": begin + len(content), "content_sum": fragment(content).to_wire().sum}


async def read_by_sum(client: RawClient, content: bytes, begin: int = 0, **more: Any) -> bytes | int:
    """Return the content, or the status of the answer."""
    first, *rest = await client.read(J, **wanted(content, begin), **more)
    return b"".join(each.content for each in rest) if first.status == pb.OK else first.status


async def delete(client: RawClient) -> None:
    """Delete the journal, and wait until no broker lists it."""
    (listed,) = await client.listing()
    revision = listed.journals[0].mod_revision
    await client.stub.Apply(pb.ApplyRequest(changes=[pb.ApplyRequest.Change(delete=J, expect_mod_revision=revision)]))


async def test_a_cache_serves_content_that_its_store_and_its_index_have_lost(
    client: RawClient, spec: MakeSpec, broker_settings: BrokerSettings
) -> None:
    content = b"first" * 300
    made = spec(stores=("file:///frags/",))
    made.fragment.length = 1024
    made.fragment.refresh_interval.FromSeconds(1)
    await create(client, made)
    await client.append(J, content)
    await client.append(J, b"second")
    # It is read from the store, once its spool is gone.
    await eventually(lambda: stored_files(broker_settings))
    await eventually(lambda: not [*broker_settings.data_dir.glob(f"spools/*/*/{0:016x}.content")])
    assert await client.content(J, 0, end_offset=len(content)) == content
    (path,) = stored_files(broker_settings)
    path.unlink()

    async def is_forgotten() -> bool:
        listed = await client.stub.ListFragments(pb.FragmentsRequest(journal=J))
        return all(each.spec.begin > 0 for each in listed.fragments)

    await eventually(is_forgotten)
    assert await read_by_sum(client, content) == content
    assert await read_by_sum(client, content[::-1]) != content[::-1]


async def test_other_brokers_serve_spools_of_deleted_journals(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    second = broker_settings.model_copy(update={"data_dir": broker_settings.data_dir.parent / "second", "id": "second"})
    async with running_broker(broker_settings) as (first, client), running_broker(second) as (other, asked):
        await create(client, spec())
        await client.append(J, b"abc")
        await client.append(J, b"def")
        assert await read_by_sum(asked, b"bcde", 1) == b"bcde", "a part of a spool"
        await delete(client)

        async def is_set_aside() -> bool:
            folders = [each.data_dir / "deleted" for each in (broker_settings, second)]
            return any([*folder.glob("*/*/deleted.json")] for folder in folders)

        await eventually(is_set_aside)
        for each in (client, asked):
            assert await read_by_sum(each, b"abcdef") == b"abcdef"
        alone = [await read_by_sum(each, b"abcdef", do_not_proxy=True) for each in (client, asked)]
        assert sorted(map(str, alone)) == sorted(map(str, [b"abcdef", pb.JOURNAL_NOT_FOUND]))
        assert await read_by_sum(client, b"abcdeX") == pb.JOURNAL_NOT_FOUND

        # The client verifies it, and learns which broker has it.
        for endpoint in (first.endpoint, other.endpoint):
            async with JournalClient(endpoint) as user:
                kept = await user.kept_content(fragment(b"abcdef"))
                assert kept is not None
                assert kept.content == b"abcdef"
                assert kept.broker.split("/")[1] in {first.broker.member.suffix, other.broker.member.suffix}
        assert len({*alone} - {pb.JOURNAL_NOT_FOUND}) == 1


async def test_a_token_must_cover_the_journal(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    settings = broker_settings.model_copy(update={"auth_keys": SecretStr(KEY)})
    keys = Keys.parse(KEY)

    def metadata(selector: str) -> tuple[tuple[str, str], ...]:
        now = SystemClock().now()
        claims = Claims(Capability.ALL, labels.parse_selector(selector), now - 1, now + 60)
        return (("authorization", f"Bearer {sign(claims, keys)}"),)

    async with running_broker(settings) as (process, client):
        made = spec()
        made.labels.CopyFrom(labels.label_set(team="a"))
        async with JournalClient(process.endpoint, auth=keys) as user:
            await user.apply([pb.ApplyRequest.Change(upsert=made)])
            await user.append(J, b"abc")

            async def asked(selector: str) -> bytes | int:
                request = pb.ReadRequest(journal=J, **wanted(b"abc"))
                answers = [each async for each in client.stub.Read(request, metadata=metadata(selector))]
                return b"".join(each.content for each in answers) or answers[0].status

            for selector in ("", f"name={J}", "team=a"):
                assert await asked(selector) == b"abc"
            for selector in ("name=other/journal", "team=b"):
                assert await asked(selector) == pb.JOURNAL_NOT_FOUND
            (info,) = (await user.list(f"name={J}")).journals
            await user.apply([pb.ApplyRequest.Change(delete=J, expect_mod_revision=info.mod_revision)])
            await eventually(lambda: [*settings.data_dir.glob("deleted/*/*/deleted.json")])
            for selector in ("", f"name={J}"):
                assert await asked(selector) == b"abc"
            for selector in ("team=a", "team!=b", "name=other/journal"):  # The labels are not known any more.
                assert await asked(selector) == pb.JOURNAL_NOT_FOUND
