"""Creation of manifests from the fragments that brokers list. Each part is complete for the content that it claims."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from coranto.client import FragmentInfo, JournalClient, JournalInfo, Moment
from coranto.client.moments import moment_at
from coranto.errors import InvalidInput
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.fragment import Fragment
from coranto.fragments.store_urls import parse_store_url
from coranto.labels import CONTENT_TYPE, value_of
from coranto.lake.manifest import JournalPart, ListedFragment, Manifest
from coranto.wire import protocol_pb2 as pb

_CONCURRENCY: Final = 16
"""Journals that are listed at the same time."""

Bound = int | Mapping[str, int]
"""One offset for all journals, or offsets by journal."""


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """The requested content of a manifest.

    `begin` and `end` are offsets; by default the first one, and the end of stored content. `as_of` is a moment, or a
    time in Unix seconds: all content up to it, from the journals' beginnings or from `begin`. `url_seconds`, unless 0,
    makes brokers sign URLs that are valid for this time. `file_root` is the root folder of `file:///` stores, so that
    URLs become paths.
    """

    begin: Bound | None = None
    end: Bound | None = None
    as_of: Moment | float | None = None
    url_seconds: int = 0
    file_root: Path | None = None


async def make_manifest(
    client: JournalClient,
    journals: Sequence[JournalInfo],
    options: ManifestOptions = ManifestOptions(),
    *,
    selector: str = "",
    cluster: str = "",
) -> Manifest:
    """Return the manifest of listed journals, as brokers know them now.

    Raises InvalidInput for offsets that a journal does not have (any more) and for journals without an offset in
    `options`, JournalRecreated for offsets with the ids of earlier journals, ContentGone if journals lack content of
    the requested moment, and the client's errors.
    """
    made_at = time.time()
    names = {info.name for info in journals}
    if options.as_of is not None:
        options = await _as_of(client, journals, options, options.as_of)
    for side, bound in (("begin", options.begin), ("end", options.end)):
        if isinstance(bound, Mapping) and (missing := sorted(names - set(bound))):
            raise InvalidInput(f"has no offset of {', '.join(missing)}; name all selected journals", field=side)
    await client.require_same(*(each for each in (options.begin, options.end) if isinstance(each, Mapping)))
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def one(info: JournalInfo) -> JournalPart:
        async with limit:
            return await _part(client, info, options)

    parts = await asyncio.gather(*map(one, journals))
    expire = made_at + options.url_seconds if options.url_seconds and _any_signed(parts) else None
    return Manifest(selector, made_at, parts, None, expire, cluster)


async def _as_of(
    client: JournalClient, journals: Sequence[JournalInfo], options: ManifestOptions, as_of: Moment | float
) -> ManifestOptions:
    """Return options with the offsets of a moment, after a check that its content exists."""
    if options.end is not None:
        raise InvalidInput("has an end itself; leave the end out", field="as-of")
    moment = as_of if isinstance(as_of, Moment) else await moment_at(client, journals, as_of)
    begins, ends = {}, {}
    for name in (info.name for info in journals):
        begin, ends[name] = moment.span(name)
        begins[name] = begin if options.begin is None else min(_given(options.begin, name, begin), ends[name])
    await client.require_content(Moment(ends, begins))
    return replace(options, begin=begins, end=ends, as_of=None)


def _given(bound: Bound, journal: str, otherwise: int) -> int:
    return bound.get(journal, otherwise) if isinstance(bound, Mapping) else bound


async def _part(client: JournalClient, info: JournalInfo, options: ManifestOptions) -> JournalPart:
    if info.spec.suspend.level == pb.JournalSpec.Suspend.FULL:  # It has no content, and no broker that could answer.
        found: Sequence[FragmentInfo] = ()
        head = info.spec.suspend.offset
    else:
        # The head first: the list may contain later appends, but must contain earlier ones.
        head = await client.head(info.name)
        found = await client.fragments(info.name, signature_seconds=options.url_seconds)
        head = max([head, *(each.fragment.end for each in found)])
    begin, end, chosen = _choose(info.name, found, head, _of(options.begin, info.name), _of(options.end, info.name))
    asked_end = _of(options.end, info.name)
    return JournalPart(
        info.name,
        begin,
        end,
        head if asked_end is None else max(end, asked_end),
        value_of(info.spec.labels, CONTENT_TYPE),
        info.create_revision,
        tuple(ListedFragment.of(each.fragment, _url(each, options)) for each in chosen),
        tuple(sorted({each.fragment.journal for each in chosen} - {info.name})),
    )


def _of(bound: Bound | None, journal: str) -> int | None:
    return bound[journal] if isinstance(bound, Mapping) else bound


def _choose(
    journal: str, found: Sequence[FragmentInfo], head: int, begin: int | None, end: int | None
) -> tuple[int, int, list[FragmentInfo]]:
    """Return the content [begin, end) that stores have of the journal without a gap, and its fragments in order.

    Raises InvalidInput if a byte of the wanted content is neither stored nor held by brokers.
    """
    known = CoverSet(each.fragment for each in found)
    first = known.begin_offset if len(known) else head
    begin = first if begin is None else begin
    last = head if end is None else end
    if begin < first:
        raise InvalidInput(
            f"{journal}: the content from {begin} to {first} is gone; give {first} or more", field="begin"
        )
    if last > head:
        raise InvalidInput(f"{journal}: its head is {head}, and {last} is beyond it", field="end")
    if begin > last:
        raise InvalidInput(f"{journal}: {begin} is beyond the end {last}; give less", field="begin")
    for low, high in known.gaps():
        if low < last and high > begin:
            raise InvalidInput(
                f"{journal}: the content from {low} to {high} is gone; make one manifest up to {low} (--end), and one "
                f"from {high} (--begin)",
                field="begin",
            )
    stored = {each.fragment: each for each in found if each.persisted}
    cover = CoverSet(stored)
    chosen: list[Fragment] = []
    at = begin
    while at < last:
        index, covered = cover.query(at)
        if not covered:
            break
        chosen.append(cover[index])
        at = cover[index].end
    return begin, min(at, last), [stored[each] for each in chosen]


def _url(found: FragmentInfo, options: ManifestOptions) -> str:
    """Return the path or URL of a fragment. Raises InvalidInput for a file if the root of file stores is unknown."""
    fragment = found.fragment
    store = parse_store_url(fragment.backing_store, check_options=False)
    key = store.key(fragment.content_path)
    if store.scheme != "file":
        return found.signed_url or f"{store.scheme}://{store.bucket}/{key}"
    if options.file_root is not None:
        return str(options.file_root.resolve() / key)
    if found.signed_url:
        return found.signed_url
    raise InvalidInput(
        f"{fragment.backing_store} is a folder, but the root of such stores is unknown: set $CORANTO_FILE_ROOT",
        field="file root",
    )


def _any_signed(parts: Sequence[JournalPart]) -> bool:
    return any(urlsplit(each.url).scheme in ("http", "https") for part in parts for each in part.fragments)
