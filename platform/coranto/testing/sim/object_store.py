"""A simulated object store, with delays, failures, and listings that lag behind.

A put may be applied and still return an error. One `SimObjectStore` is the service; brokers reach it over the network,
through `SimFragments`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from coranto.errors import FragmentNotFound, StoreError
from coranto.fragments.fragment import Fragment
from coranto.fragments.journal_folders import MARKER, StoredFile
from coranto.fragments.store_urls import parse_store_url
from coranto.fragments.stores import Content, FragmentStore, StoreRegistry
from coranto.testing.sim.network import Network, TimedOut
from coranto.testing.sim.timeline import Process

NODE = "store"
_TIMEOUT_SECONDS = 30.0
_PIECE_SECONDS = 0.25
_PROBES = ".test/"
"""The prefix of the names of probe journals."""
T = TypeVar("T")


@dataclass(slots=True)
class StoreFaults:
    """The faults of a store: probabilities per call, and times in seconds.

    `list_lag` is the time until new objects are in listings, `slow` the longest delay of a call.
    `refuse_fragments` is the probability that a put is refused, except for probes.
    """

    refuse: float = 0.0
    fail_after_applying: float = 0.0
    list_lag: float = 0.0
    slow: float = 0.0
    refuse_fragments: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredObject:
    fragment: Fragment
    data: bytes
    stored_at: float


class SimObjectStore:
    """The service."""

    def __init__(self, network: Network, rng: random.Random) -> None:
        self.faults = StoreFaults()
        self.objects: dict[str, StoredObject] = {}
        self.lost: list[Fragment] = []
        """Fragments that `lose` has removed."""
        self.markers: dict[str, float] = {}
        """The time of putting each marker of a journal's folder."""
        self.notes: dict[str, tuple[float, bytes]] = {}
        """Files that are not fragments, by path: the time of the put, and the content."""
        self.faulty: Counter[str] = Counter()
        """The number of calls that met each fault."""
        self._network = network
        self._rng = rng

    def put(self, fragment: Fragment, data: bytes) -> None:
        self._refuse()
        if self.faults.refuse_fragments and not fragment.journal.startswith(_PROBES):
            self._refuse_fragment()
        now = self._network.loop.time()
        known = self.objects.get(fragment.content_path)
        self.objects[fragment.content_path] = StoredObject(fragment, data, known.stored_at if known else now)
        self._network.loop.note(f"store has {fragment.content_path}")
        if self._rng.random() < self.faults.fail_after_applying:
            self.faulty["applied and failed"] += 1
            raise StoreError(f"503: the put of {fragment.content_path} failed")

    def size(self, fragment: Fragment) -> int | None:
        self._refuse()
        found = self.objects.get(fragment.content_path)
        return None if found is None else len(found.data)

    def get(self, fragment: Fragment) -> bytes:
        self._refuse()
        found = self.objects.get(fragment.content_path)
        if found is None:
            raise FragmentNotFound(f"no object {fragment.content_path}")
        return found.data

    def files(self, journal: str) -> list[StoredFile]:
        self._refuse()
        folder, until = f"{journal}/", self._network.loop.time() - self.faults.list_lag
        stored = [
            *((path, found.stored_at, len(found.data)) for path, found in self.objects.items()),
            *((path, stored_at, 0) for path, stored_at in self.markers.items()),
            *((path, stored_at, len(data)) for path, (stored_at, data) in self.notes.items()),
        ]
        return [
            StoredFile(path.removeprefix(folder), int(self._network.loop.epoch + stored_at), size)
            for path, stored_at, size in stored
            if path.startswith(folder) and stored_at <= until
        ]

    def mark(self, journal: str) -> None:
        self._refuse()
        self.markers.setdefault(f"{journal}/{MARKER}", self._network.loop.time())

    def remove(self, fragment: Fragment) -> None:
        self._refuse()
        self.objects.pop(fragment.content_path, None)

    def lose(self, fragment: Fragment) -> None:
        """Lose a stored fragment, as a broken store does. It may be stored again."""
        del self.objects[fragment.content_path]
        self.lost.append(fragment)

    def put_note(self, path: str, content: bytes) -> None:
        self._refuse()
        self.notes[path] = self._network.loop.time(), content

    def get_note(self, path: str) -> bytes:
        self._refuse()
        found = self.notes.get(path)
        if found is None:
            raise FragmentNotFound(f"no file {path}")
        return found[1]

    def remove_note(self, path: str) -> None:
        self._refuse()
        self.notes.pop(path, None)

    def _refuse(self) -> None:
        if self._rng.random() < self.faults.refuse:
            self.faulty["refused"] += 1
            raise StoreError("503: slow down")

    def _refuse_fragment(self) -> None:
        if self._rng.random() < self.faults.refuse_fragments:
            self.faulty["refused, being of a fragment"] += 1
            raise StoreError("403: probes only")

    async def delay(self) -> None:
        """Wait for the random delay of a slow store, but no longer than the store stays slow."""
        if not self.faults.slow:
            return
        self.faulty["slow"] += 1
        for _ in range(int(self._rng.uniform(0, self.faults.slow) / _PIECE_SECONDS) + 1):
            if self.faults.slow:
                await asyncio.sleep(_PIECE_SECONDS)


class SimFragments(FragmentStore):
    """One process's access to the service."""

    def __init__(self, url: str, service: SimObjectStore, network: Network, node: str, process: Process) -> None:
        self.url = url
        self._service = service
        self._network = network
        self._node = node
        self._process = process

    async def put(self, fragment: Fragment, content: Content) -> None:
        if not isinstance(content, bytes):
            content = b"".join([piece async for piece in content])
        data = content
        await self._call(lambda: self._service.put(fragment, data))

    async def size(self, fragment: Fragment) -> int | None:
        return await self._call(lambda: self._service.size(fragment))

    async def files(self, journal: str) -> AsyncIterator[StoredFile]:
        for file in await self._call(lambda: self._service.files(journal)):
            yield file

    async def mark(self, journal: str) -> None:
        await self._call(lambda: self._service.mark(journal))

    async def get(self, fragment: Fragment) -> bytes:
        return await self._call(lambda: self._service.get(fragment))

    def sign(self, fragment: Fragment, ttl_seconds: float) -> str:
        return f"sim://{NODE}/{fragment.content_path}"

    async def sign_async(self, fragment: Fragment, ttl_seconds: float) -> str:
        return self.sign(fragment, ttl_seconds)

    async def remove(self, fragment: Fragment) -> None:
        await self._call(lambda: self._service.remove(fragment))

    async def put_note(self, path: str, content: bytes) -> None:
        await self._call(lambda: self._service.put_note(path, content))

    async def get_note(self, path: str) -> bytes:
        return await self._call(lambda: self._service.get_note(path))

    async def remove_note(self, path: str) -> None:
        await self._call(lambda: self._service.remove_note(path))

    async def _call(self, serve: Callable[[], T]) -> T:
        self._process.check_alive()
        await self._service.delay()
        try:
            return await self._network.request(self._node, NODE, serve, _TIMEOUT_SECONDS)
        except TimedOut as error:
            raise StoreError(f"{self.url}: {error}") from error


class SimStores(StoreRegistry):
    """A registry whose URLs all refer to the simulated service."""

    def __init__(self, service: SimObjectStore, network: Network, node: str, process: Process) -> None:
        super().__init__()
        self._reach = (service, network, node, process)
        self._found: dict[str, SimFragments] = {}

    def check(self, url: str) -> None:
        parse_store_url(url)

    def get(self, url: str) -> FragmentStore:
        found = self._found.get(url)
        if found is None:
            found = self._found[url] = SimFragments(url, *self._reach)
        return found
