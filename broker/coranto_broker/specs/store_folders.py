"""The check that no two journals share a folder in a fragment store. Pure.

A journal's folder is its name below the store's prefix. So `a/b` in `s3://bucket/` and `b` in `s3://bucket/a/` have the
same folder, and each would treat the other's fragments as its own. The same holds if one folder is within the other.
Names in one store are compared by `nesting`. Stores with `find` and `replace` are not compared, because these options
rewrite paths.

This broker knows the stores as of a revision of etcd. Compares of the transaction fail if a conflicting journal was
changed since, so if two brokers assign one folder concurrently, one transaction fails. A transaction that brings a new
prefix into a bucket requires that no journal has changed at all. If the bucket has other prefixes, it also writes the
bucket's key. A transaction that uses only known prefixes requires that this key was not written, and that no journal
has changed whose name gives the same folder below one of the other prefixes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from coranto.coordination.etcd import Compare, CompareTarget, Put, Relation
from coranto.errors import InvalidInput
from coranto.fragments.store_urls import parse_store_url
from coranto.names import names_above
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto_broker.replication.resolver import JournalState


class FolderConflict(NamedTuple):
    """A journal whose folder in `store` would be, contain or be within the folder of another journal."""

    name: str
    store: str
    other: str
    other_store: str


class FolderGuards(NamedTuple):
    """Compares and puts that a transaction needs to keep other journals out of its journals' folders."""

    compares: list[Compare]
    puts: list[Put]


@lru_cache(maxsize=1024)
def _place(url: str) -> tuple[tuple[str, ...], str] | None:
    """Return the bucket of a store, and the prefix within it; None for stores that are not compared."""
    try:
        parsed = parse_store_url(url, check_options=False)
    except InvalidInput:
        return None
    if parsed.rewrites:
        return None
    endpoint = parsed.options.get("endpoint", "")
    return (parsed.scheme, parsed.tenant, parsed.account, parsed.bucket, endpoint), parsed.prefix


def folder_conflict(
    state: JournalState, upserts: Sequence[pb.JournalSpec], deleted: Collection[str]
) -> FolderConflict | None:
    """Find a journal of `upserts` whose new stores give it a folder of another journal, which is not `deleted`.

    Stores that a journal already has are not checked.
    """
    changed = {spec.name: spec for spec in upserts}
    kept = (item.spec for item in state.items if item.id not in changed and item.id not in deleted)
    specs = [*kept, *upserts]
    prefixes: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for url in {url for spec in specs for url in spec.fragment.stores}:
        if (place := _place(url)) is not None:
            prefixes[place[0]].add(place[1])
    several = {bucket for bucket, found in prefixes.items() if len(found) > 1}
    if not several:
        return None
    owners: dict[tuple[str, ...], dict[str, list[tuple[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for spec in specs:
        for bucket, folder, url in _folders(spec, several):
            owners[bucket][folder].append((spec.name, url))
    ordered = {bucket: sorted(folders) for bucket, folders in owners.items()}
    for spec in upserts:
        item = state.item(spec.name)
        present = item.spec.fragment.stores if item is not None else ()
        for bucket, folder, url in _folders(spec, several):
            if url in present:
                continue
            for near in _related(folder, owners[bucket], ordered[bucket]):
                for other, other_url in owners[bucket][near]:
                    if other != spec.name and _place(other_url) != _place(url):
                        return FolderConflict(spec.name, url, other, other_url)
    return None


def folder_guards(state: JournalState, upserts: Sequence[pb.JournalSpec]) -> FolderGuards:
    """Return the guards of a transaction of `upserts`, which have no `folder_conflict` as of `state`."""
    new: dict[tuple[str, ...], set[tuple[str, str]]] = defaultdict(set)
    for spec in upserts:
        item = state.item(spec.name)
        present = item.spec.fragment.stores if item is not None else ()
        for url in spec.fragment.stores:
            if url not in present and (place := _place(url)) is not None:
                new[place[0]].add((place[1], spec.name))
    known: dict[tuple[str, ...], set[str]] = {bucket: set() for bucket in new}
    for url in {url for item in state.items for url in item.spec.fragment.stores} if new else ():
        if (place := _place(url)) is not None and place[0] in known:
            known[place[0]].add(place[1])
    introduced = {bucket for bucket, found in new.items() if not known[bucket].issuperset(each for each, _ in found)}
    if introduced:
        # No put for a bucket's first prefix: a concurrent Apply with another first prefix has the same compare.
        puts = [Put(_bucket_key(state, bucket), repr(bucket).encode()) for bucket in introduced if known[bucket]]
        return FolderGuards([unchanged_since(state)], puts)
    compares = [_unchanged(state, _bucket_key(state, bucket)) for bucket in new]
    for bucket, found in new.items():
        for prefix, name in found:
            folder = prefix + name
            for other in known[bucket] - {prefix}:
                if other.startswith(f"{folder}/"):
                    return FolderGuards([unchanged_since(state)], [])
                if folder.startswith(other):
                    key = state.layout.items + folder.removeprefix(other)
                    above = [state.layout.items + each for each in names_above(folder.removeprefix(other))]
                    compares += [_unchanged(state, each) for each in (*above, key)]
                    compares.append(_unchanged(state, f"{key}/", prefix=True))
    return FolderGuards(list(dict.fromkeys(compares)), [])


def unchanged_since(state: JournalState) -> Compare:
    """Return a compare that fails if a journal was created or changed since `state`. It implies all other guards."""
    return _unchanged(state, state.layout.items, prefix=True)


def _unchanged(state: JournalState, key: str, *, prefix: bool = False) -> Compare:
    return Compare(key, CompareTarget.MOD_REVISION, state.revision + 1, Relation.LESS, prefix)


def _bucket_key(state: JournalState, bucket: tuple[str, ...]) -> str:
    return state.layout.bucket_key(hashlib.sha1(repr(bucket).encode(), usedforsecurity=False).hexdigest())


def _folders(spec: pb.JournalSpec, buckets: Collection[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the folders of a journal in these buckets, as bucket, path and the store's URL."""
    for url in spec.fragment.stores:
        place = _place(url)
        if place is not None and place[0] in buckets:
            yield place[0], place[1] + spec.name, url


def _related(folder: str, owners: Collection[str], ordered: Sequence[str]) -> Iterable[str]:
    """Return the folders of `owners` that are `folder`, above it or below it. `ordered` is `owners`, sorted."""
    above = [each for each in (*names_above(folder), folder) if each in owners]
    begin = bisect_left(ordered, f"{folder}/")
    end = bisect_left(ordered, f"{folder}0", begin)  # "0" follows "/".
    return [*above, *ordered[begin:end]]
