"""Fragments that are missing from their store, or damaged there: find a good copy, and put it back.

A good copy may be in another store of the journal, in the local files of one of its brokers, or in a broker's cache. It
counts only if its SHA-1 is that of the fragment's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from coranto.audit import AuditStatus, FragmentAudit, audit_journal, uncovered
from coranto.client import ClientConfig, JournalClient, JournalInfo
from coranto.errors import CorantoError, FragmentNotFound, InvalidInput
from coranto.fragments.codecs import compress
from coranto.fragments.forks import folders_of
from coranto.fragments.fragment import Codec, Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.recovery.diagnosing import diagnosed
from coranto.recovery.plan import Diagnosis, Loss, RecoveryStep, Remark, StepKind

ASIDE: Final = ".coranto-damaged"
"""The folder of a store to which damaged files are moved."""
_BROKER: Final = "broker "
_LISTING_S: Final = 330.0
"""The time in seconds for which brokers are waited for that list a store again. By default they do every 5 minutes."""
_LOOK_AGAIN_S: Final = 0.2
_PATIENCE_S: Final = 0.3
"""The time in seconds after a failure for which one broker is asked for a copy again."""
_DAMAGED: Final = (AuditStatus.MISSING, AuditStatus.CORRUPT)


class ContentDoctor:
    """Finds damaged and missing fragments of journals, and restores those of which there is a good copy.

    It reads all content of the journals. `stores` are opened by this process, with its own credentials.
    """

    def __init__(
        self,
        client: JournalClient,
        stores: StoreRegistry,
        journals: Sequence[JournalInfo],
        *,
        strays: Collection[str] = (),
        connect: Callable[[ClientConfig], JournalClient] = JournalClient.of,
    ) -> None:
        """`strays` are files that are none of the journals', by their content paths: they are set aside.

        `connect` makes clients of single brokers.
        """
        self._strays = frozenset(strays)
        self._connect = connect
        self._client = client
        self._stores = stores
        self._journals = {info.name: info for info in journals}

    async def diagnose(self) -> Diagnosis:
        broken: set[str] = set()
        return await diagnosed(lambda info: self._examine(info, broken), list(self._journals.values()))

    async def _examine(self, info: JournalInfo, broken: set[str]) -> Diagnosis:
        """Diagnose one journal. Stores of the URLs in `broken` are not asked; one that cannot be used is added."""
        steps: list[RecoveryStep] = []
        losses: list[Loss] = []
        remarks: list[Remark] = []
        try:
            audit = await audit_journal(self._client, self._stores, info.name, broken=broken)
        except CorantoError as error:
            return Diagnosis(remarks=[Remark(info.name, f"its content cannot be examined now: {error}")])
        explained: list[tuple[int, int]] = []
        found = [each for each in audit.fragments if each.fragment.content_path not in self._strays]
        reach = max((each.fragment.end for each in found), default=0)
        stored = max((each.fragment.begin for each in found if each.fragment.backing_store), default=0)
        remarks += _unreadable(info.name, found)
        for each in found:
            if each.status is AuditStatus.OK:
                if not each.fragment.backing_store and each.fragment.length and each.fragment.end <= stored:
                    steps += await self._store_again(info, each.fragment)
                continue
            explained.append((each.fragment.begin, each.fragment.end))
            if each.fragment.journal != info.name:
                remarks.append(_shared(info, each))
                continue
            await self._look_for_copy(info, each, steps, losses, remarks)
        losses += [
            Loss(info.name, f"content [{begin}, {end}) is in no fragment that its brokers know")
            for begin, end in audit.gaps
            if (begin < reach or not self._strays) and not any(low <= begin and end <= high for low, high in explained)
        ]
        return Diagnosis(steps, losses, remarks)

    async def _store_again(self, info: JournalInfo, local: Fragment) -> list[RecoveryStep]:
        """Return the step for a fragment that only brokers have, although its store has later ones.

        It was stored and is gone from there, so no broker stores it again by itself.
        """
        for url in info.spec.fragment.stores:
            fragment = replace(local, backing_store=url)
            with contextlib.suppress(CorantoError):
                await self._stores.get(url).read(fragment)
                return []  # The brokers' next listing finds it.
            async with contextlib.aclosing(self._copies(info, fragment)) as copies:
                async for source, _ in copies:
                    return [_restore(fragment, source, missing=True)]
        return []

    async def _look_for_copy(
        self,
        info: JournalInfo,
        found: FragmentAudit,
        steps: list[RecoveryStep],
        losses: list[Loss],
        remarks: list[Remark],
    ) -> None:
        fragment = found.fragment
        where = f"[{fragment.begin}, {fragment.end})"
        if not fragment.backing_store:
            async with contextlib.aclosing(self._copies(info, fragment)) as copies:
                async for source, _ in copies:
                    text = f"a broker's own copy of {where} is damaged, and brokers mend it: {source} has it"
                    remarks.append(Remark(info.name, text))
                    return
            losses.append(_unserved(info, fragment))
            return
        if found.status not in _DAMAGED:
            return  # `_unreadable` tells that.
        async with contextlib.aclosing(self._copies(info, fragment)) as copies:
            async for source, _ in copies:
                steps.append(_restore(fragment, source, missing=found.status is AuditStatus.MISSING))
                return
        elsewhere = await self._is_elsewhere(info, fragment)
        if found.status is AuditStatus.CORRUPT:
            steps.append(
                set_aside(fragment, "is damaged" + (", and other files have its content" if elsewhere else ""))
            )
        if elsewhere:
            return
        losses.append(
            Loss(
                info.name,
                f"content {where} is gone: {fragment.backing_store} has no good file of it, and no other store and no "
                f"broker has a copy. A copy under the name {fragment.content_path} would bring it back",
            )
        )

    async def _is_elsewhere(self, info: JournalInfo, fragment: Fragment) -> bool:
        """Return True if other good files of the journal's stores have the content of these offsets."""
        spans: list[tuple[int, int]] = []
        own, *_ = folders_of(info.spec)
        for url in info.spec.fragment.stores:
            with contextlib.suppress(CorantoError):
                store = self._stores.get(url)
                async for each in store.list(info.name):
                    same = (each.backing_store, each.content_path) == (fragment.backing_store, fragment.content_path)
                    if same or not own.takes(each) or each.begin >= fragment.end or each.end <= fragment.begin:
                        continue
                    with contextlib.suppress(CorantoError):
                        await store.read(each)
                        spans.append((each.begin, each.end))
        return not uncovered(spans, fragment.begin, fragment.end)

    async def _copies(self, info: JournalInfo, fragment: Fragment) -> AsyncGenerator[tuple[str, bytes]]:
        """Yield good copies, each with the place that it is from."""
        for url in info.spec.fragment.stores:
            if url == fragment.backing_store:
                continue
            with contextlib.suppress(CorantoError):
                yield f"store {url}", await self._stores.get(url).read(fragment)
        route = zip(info.route.members, info.route.endpoints, strict=False)
        for member, endpoint in sorted(route, key=lambda each: (each[0].zone, each[0].suffix)):
            content = await self._of_broker(endpoint, fragment)
            if content is not None:
                yield f"{_BROKER}{member.zone}/{member.suffix}", content

    async def _of_broker(self, endpoint: str, fragment: Fragment) -> bytes | None:
        """Return a fragment's content as one broker serves it; None if it does not, or if the SHA-1 differs."""
        pieces: list[bytes] = []
        try:
            # Without a cache of routes the broker itself is asked, and it serves what it has itself.
            config = replace(self._client.config, endpoint=endpoint, route_cache=0, patience=_PATIENCE_S)
            async with self._connect(config) as broker:
                reading = broker.read(
                    fragment.journal, fragment.begin, end_offset=fragment.end, direct=False, fail_on_jump=True
                )
                async with contextlib.aclosing(reading) as chunks:
                    pieces.extend([chunk.content async for chunk in chunks])
        except CorantoError:
            return None
        content = b"".join(pieces)
        right = hashlib.sha1(content, usedforsecurity=False).digest() == fragment.sum
        return content if right else None

    async def act(self, step: RecoveryStep) -> str:
        fragment = _fragment_of(step)
        store = self._stores.get(fragment.backing_store)
        if step.kind is StepKind.SET_ASIDE_FRAGMENT:
            if not step.facts.get("stray"):
                with contextlib.suppress(CorantoError):
                    await store.read(fragment)
                    return "left it alone: it is good now"
            with contextlib.suppress(FragmentNotFound):
                await store.put_note(f"{ASIDE}/{fragment.content_path}", await store.get(fragment))
                await store.remove(fragment)
            return await self._forgotten(fragment)
        with contextlib.suppress(CorantoError):
            await store.read(fragment)
            return "its store has it"
        async with contextlib.aclosing(self._copies(self._journals[step.subject], fragment)) as copies:
            async for source, content in copies:
                await store.put(fragment, compress(fragment.codec, content))
                await store.read(fragment)
                return f"put {len(content)} bytes of {source} into {store.url}"
        raise CorantoError(f"no good copy of {fragment.content_path} is left")

    async def _forgotten(self, fragment: Fragment) -> str:
        """Wait until all of its brokers have listed the store again, and tell if they have."""
        info = self._journals[fragment.journal]
        try:
            async with asyncio.timeout(_LISTING_S):
                for endpoint in info.route.endpoints:
                    config = replace(self._client.config, endpoint=endpoint, route_cache=0, patience=_PATIENCE_S)
                    async with self._connect(config) as broker:
                        while True:
                            listed = [info.fragment for info in await broker.fragments(fragment.journal)]
                            if all(each.content_path != fragment.content_path for each in listed):
                                break
                            await asyncio.sleep(_LOOK_AGAIN_S)
        except (TimeoutError, CorantoError):
            return "moved; brokers may list it until their next listing of the store"
        return "moved"


def set_aside(fragment: Fragment, why: str, loses: str = "", *, stray: bool = False) -> RecoveryStep:
    """Return the step that moves a file to where nothing reads it. A `stray` has the content of its name."""
    where = f"[{fragment.begin}, {fragment.end})"
    action = f"move the file of {where}, which {why}, to {ASIDE}/ of {fragment.backing_store}, where nothing reads it"
    step = _step(StepKind.SET_ASIDE_FRAGMENT, fragment, action)
    return replace(step, loses=loses, facts={**step.facts, "stray": stray})


def _shared(info: JournalInfo, found: FragmentAudit) -> Remark:
    fragment = found.fragment
    return Remark(
        info.name,
        f"its content [{fragment.begin}, {fragment.end}) is in a fragment that it shares, and that is "
        f"{found.status.value}: recover {fragment.journal}, which has it",
    )


def _unserved(info: JournalInfo, fragment: Fragment) -> Loss:
    store = next(iter(info.spec.fragment.stores), "a fragment store of the journal")
    return Loss(
        info.name,
        f"content [{fragment.begin}, {fragment.end}) is damaged on the disk of each broker that has it, and is not "
        f"stored. It cannot be read, and the journal goes on behind it. A copy under the name {fragment.content_path} "
        f"in {store} would bring it back. Keep the disk: `coranto broker set-aside` shows how much of it is sound",
    )


def _unreadable(journal: str, found: Sequence[FragmentAudit]) -> list[Remark]:
    """Return a remark for each store whose fragments cannot be read now, or whose brokers do not serve them."""
    first: dict[str, FragmentAudit] = {}
    for each in found:
        if each.status is AuditStatus.UNREADABLE and each.fragment.backing_store:
            first.setdefault(each.fragment.backing_store, each)
    return [
        Remark(journal, f"its content in {url} cannot be examined now, so plan again later: {each.problem}")
        for url, each in first.items()
    ]


def file_of(step: RecoveryStep) -> tuple[str, str]:
    """Return the store and the path of the file that a step is of; empty texts if it is of none."""
    if step.kind not in (StepKind.RESTORE_FRAGMENT, StepKind.SET_ASIDE_FRAGMENT):
        return "", ""
    fragment = _fragment_of(step)
    return fragment.backing_store, fragment.content_path


def _restore(fragment: Fragment, source: str, *, missing: bool) -> RecoveryStep:
    problem = "is missing from" if missing else "is damaged in"
    return _step(
        StepKind.RESTORE_FRAGMENT,
        fragment,
        f"put [{fragment.begin}, {fragment.end}), which {problem} {fragment.backing_store}, back from {source}",
    )


def _step(kind: StepKind, fragment: Fragment, action: str) -> RecoveryStep:
    return RecoveryStep(
        kind,
        fragment.journal,
        action,
        facts={
            "begin": fragment.begin,
            "end": fragment.end,
            "sum": fragment.sum.hex(),
            "codec": fragment.codec.value,
            "store": fragment.backing_store,
            "postfix": fragment.path_postfix,
        },
    )


def _fragment_of(step: RecoveryStep) -> Fragment:
    facts = step.facts
    begin, end, codec = facts["begin"], facts["end"], facts["codec"]
    if not (isinstance(begin, int) and isinstance(end, int) and isinstance(codec, int)):
        raise InvalidInput(f"step for {step.subject} names no fragment", field="facts")
    return Fragment(
        step.subject,
        begin,
        end,
        bytes.fromhex(str(facts["sum"])),
        Codec.from_wire(codec),
        backing_store=str(facts["store"]),
        path_postfix=str(facts["postfix"]),
    )
