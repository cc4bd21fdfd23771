"""Content that is restored from brokers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from coranto.client import ClientConfig, JournalInfo
from coranto.client.values import Chunk, FragmentInfo
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.stores import StoreRegistry
from coranto.recovery import (
    ContentDoctor,
)
from coranto.wire import protocol_pb2 as pb

SIZE = 3000


class Listed:
    """A client whose brokers list these fragments, and serve their content."""

    def __init__(self, contents: dict[Fragment, bytes]) -> None:
        self.contents = contents
        self.config = ClientConfig("127.0.0.1:1")

    async def __aenter__(self) -> Listed:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def head(self, journal: str) -> int:
        return max(each.end for each in self.contents)

    async def fragments(self, journal: str) -> list[FragmentInfo]:
        return [FragmentInfo(each, "") for each in self.contents]

    async def kept_content(self, fragment: Fragment) -> None:
        """Return nothing, as brokers of an earlier version, which find no content by its SHA-1."""

    async def read(self, journal: str, offset: int, **options: object) -> AsyncGenerator[Chunk]:
        for fragment, content in self.contents.items():
            if fragment.begin == offset and content:
                yield Chunk(offset, content, fragment.end)


@pytest.mark.parametrize(
    ("broker_has", "store_has", "restored"), [(True, False, True), (False, False, False), (True, True, False)]
)
async def test_only_content_that_the_store_lacks_is_restored_from_brokers(tmp_path, broker_has, store_has, restored):
    stores = StoreRegistry(tmp_path)
    contents = [bytes([65 + number]) * SIZE for number in range(3)]
    first, second, live = [
        Fragment("j", number * SIZE, (number + 1) * SIZE, sum_of(content), Codec.NONE)
        for number, content in enumerate(contents)
    ]
    second = replace(second, backing_store="file:///")
    await stores.get("file:///").put(second, contents[1])
    if store_has:
        await stores.get("file:///").put(first, contents[0])
    listed = dict(zip((first, second, live), contents, strict=True))
    spec = pb.JournalSpec(name="j", fragment=pb.JournalSpec.Fragment(stores=["file:///"]))
    route = pb.Route(members=[pb.ProcessSpec.ID(zone="local", suffix="broker-0")], endpoints=["127.0.0.1:1"])
    info = JournalInfo(spec, 1, 1, route)
    serving = Listed(listed if broker_has else {**listed, first: b""})

    doctor = ContentDoctor(Listed(listed), stores, [info], connect=lambda config: serving)
    diagnosis = await doctor.diagnose()

    assert [step.facts["begin"] for step in diagnosis.steps] == ([0] if restored else [])
    assert not diagnosis.losses
