"""Repair of fragments that are missing from their store or damaged there: find a good copy, and restore it.

Brokers forget a fragment whose file is gone when they list the store. So fragments that only audits remember are
examined, too. `coranto.recovery.copies` lists the places of copies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from coranto.audit import AuditStatus, FragmentAudit, Kind, audit_journal, uncovered
from coranto.audit.losses import overlaps
from coranto.client import ClientConfig, JournalClient, JournalInfo
from coranto.errors import CorantoError, FragmentNotFound, InvalidInput
from coranto.fragments.codecs import compress
from coranto.fragments.forks import Share, folders_of
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.recovery.copies import BROKER_SECONDS, GoodCopies
from coranto.recovery.diagnosing import diagnose_all
from coranto.recovery.fragment_steps import (
    ASIDE,
    fragment_loss,
    fragment_of,
    restore,
    set_aside,
    shared_remark,
    unreadable,
    unserved_loss,
)
from coranto.recovery.heads import LISTING_SECONDS
from coranto.recovery.plan import Diagnosis, Loss, RecoveryStep, Remark, StepKind

_RECHECK_SECONDS: Final = 0.2
_DAMAGED: Final = (AuditStatus.MISSING, AuditStatus.CORRUPT)


class ContentDoctor:
    """Finds damaged and missing fragments of journals, and restores them from good copies, if there are any.

    It reads all content of the journals. `stores` are opened by this process, with its own credentials.
    """

    def __init__(
        self,
        client: JournalClient,
        stores: StoreRegistry,
        journals: Sequence[JournalInfo],
        *,
        strays: Collection[str] = (),
        missed: Mapping[str, Sequence[Fragment]] = {},
        connect: Callable[[ClientConfig], JournalClient] = JournalClient.of,
    ) -> None:
        """`strays` are the content paths of files that belong to none of the journals: these files are set aside.

        `missed` are the fragments that audits miss, by journal. `connect` creates clients of single brokers.
        """
        self._strays = frozenset(strays)
        self._missed = missed
        self._copies = GoodCopies(client, stores, connect)
        self._connect = connect
        self._client = client
        self._stores = stores
        self._journals = {info.name: info for info in journals}

    async def diagnose(self) -> Diagnosis:
        broken: set[str] = set()
        return await diagnose_all(lambda info: self._examine(info, broken), list(self._journals.values()))

    async def _examine(self, info: JournalInfo, broken: set[str]) -> Diagnosis:
        """Diagnose one journal. Stores whose URLs are in `broken` are skipped; unusable stores are added to it."""
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
        remarks += unreadable(info.name, found)
        for each in found:
            if each.status is AuditStatus.OK:
                if not each.fragment.backing_store and each.fragment.length and each.fragment.end <= stored:
                    steps += await self._store_again(info, each.fragment)
                continue
            explained.append((each.fragment.begin, each.fragment.end))
            if each.fragment.journal != info.name:
                remarks.append(shared_remark(info, each))
                continue
            await self._find_copy(info, each, steps, losses, remarks)
        sound = [(each.fragment.begin, each.fragment.end) for each in found if each.status is AuditStatus.OK]
        known = {_key(each.fragment) for each in found}
        for missed in self._missed.get(info.name, ()):
            if _key(missed) in known:
                continue
            explained.append((missed.begin, missed.end))
            await self._find_missed(info, missed, sound, steps, losses, remarks)
        losses += [
            Loss(
                info.name,
                Kind.CONTENT_LOST,
                f"content [{begin}, {end}) is in no fragment that its brokers or audits know",
                begin=begin,
                end=end,
            )
            for low, high in audit.gaps
            if low < reach or not self._strays
            for begin, end in uncovered(explained, low, high)
        ]
        return Diagnosis(steps, losses, remarks)

    async def _find_missed(
        self,
        info: JournalInfo,
        missed: Fragment,
        sound: list[tuple[int, int]],
        steps: list[RecoveryStep],
        losses: list[Loss],
        remarks: list[Remark],
    ) -> None:
        """Look for a copy of a fragment that an audit remembers but brokers have forgotten."""
        owner = _owner(info, missed)
        if owner != info.name:
            remarks.append(shared_remark(info, FragmentAudit(replace(missed, journal=owner), AuditStatus.MISSING)))
        elif not overlaps((missed.begin, missed.end), sound):
            await self._find_copy(info, FragmentAudit(missed, AuditStatus.MISSING), steps, losses, remarks)
        else:
            kept_at = ""
            async with contextlib.aclosing(self._copies.of(info, missed)) as copies:
                async for source, _ in copies:
                    kept_at = source
                    break
            losses.append(
                fragment_loss(
                    missed,
                    "the journal has other content at these offsets now, so no step can put it back"
                    + (f". {kept_at} still has it" if kept_at else ""),
                    kept_at,
                )
            )

    async def _store_again(self, info: JournalInfo, local: Fragment) -> list[RecoveryStep]:
        """Return the step for a fragment that only brokers have, although its store has later fragments.

        It was stored before and its file is gone, so no broker stores it again by itself.
        """
        for url in info.spec.fragment.stores:
            fragment = replace(local, backing_store=url)
            with contextlib.suppress(CorantoError):
                await self._stores.get(url).read(fragment)
                return []  # The brokers' next listing finds it.
            async with contextlib.aclosing(self._copies.of(info, fragment)) as copies:
                async for source, _ in copies:
                    return [restore(fragment, source, missing=True)]
        return []

    async def _find_copy(
        self,
        info: JournalInfo,
        found: FragmentAudit,
        steps: list[RecoveryStep],
        losses: list[Loss],
        remarks: list[Remark],
    ) -> None:
        fragment = found.fragment
        where = f"[{fragment.begin}, {fragment.end})"
        if not fragment.backing_store and found.status is not AuditStatus.MISSING:
            async with contextlib.aclosing(self._copies.of(info, fragment)) as copies:
                async for source, _ in copies:
                    text = f"a broker's own copy of {where} is damaged, and brokers repair it: {source} has it"
                    remarks.append(Remark(info.name, text))
                    return
            losses.append(unserved_loss(info, fragment))
            return
        if found.status not in _DAMAGED:
            return  # `unreadable` reports it.
        target = _with_store(info, fragment)
        async with contextlib.aclosing(self._copies.of(info, fragment)) as copies:
            async for source, _ in copies:
                if target.backing_store:
                    steps.append(restore(target, source, missing=found.status is AuditStatus.MISSING))
                else:
                    losses.append(
                        fragment_loss(target, f"its spec names no store to put it into. {source} has it", source)
                    )
                return
        elsewhere = await self._is_elsewhere(info, fragment)
        if found.status is AuditStatus.CORRUPT:
            steps.append(
                set_aside(fragment, "is damaged" + (", and other files have its content" if elsewhere else ""))
            )
        if elsewhere:
            return
        losses.append(
            fragment_loss(
                target,
                "no store of the journal has a good file of it, and no broker has it in its cache, its spools or what "
                f"it set aside. A file {fragment.content_path} in {target.backing_store or 'a store'}, whose content "
                f"has the SHA-1 {fragment.sum.hex()}, would bring it back",
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
                    if same or not own.contains(each) or each.begin >= fragment.end or each.end <= fragment.begin:
                        continue
                    with contextlib.suppress(CorantoError):
                        await store.read(each)
                        spans.append((each.begin, each.end))
        return not uncovered(spans, fragment.begin, fragment.end)

    async def act(self, step: RecoveryStep) -> str:
        fragment = fragment_of(step)
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
        async with contextlib.aclosing(self._copies.of(self._journals[step.subject], fragment)) as copies:
            async for source, content in copies:
                await store.put(fragment, compress(fragment.codec, content))
                await store.read(fragment)
                return f"put {len(content)} bytes of {source} into {store.url}"
        raise CorantoError(f"no good copy of {fragment.content_path} is left")

    async def _forgotten(self, fragment: Fragment) -> str:
        """Wait until the journal's brokers no longer list the fragment, and return a description of the outcome."""
        info = self._journals[fragment.journal]
        try:
            async with asyncio.timeout(LISTING_SECONDS):
                for endpoint in info.route.endpoints:
                    config = replace(
                        self._client.config, endpoint=endpoint, route_cache=0, retry_timeout=BROKER_SECONDS
                    )
                    async with self._connect(config) as broker:
                        while True:
                            listed = [info.fragment for info in await broker.fragments(fragment.journal)]
                            if all(each.content_path != fragment.content_path for each in listed):
                                break
                            await asyncio.sleep(_RECHECK_SECONDS)
        except (TimeoutError, CorantoError):
            return "moved; brokers may list it until their next listing of the store"
        return "moved"


def _key(fragment: Fragment) -> tuple[int, int, bytes]:
    return fragment.begin, fragment.end, fragment.sum


def _owner(info: JournalInfo, fragment: Fragment) -> str:
    """Return the journal that a fragment belongs to: a fork shares fragments of its source."""
    try:
        shares: Sequence[Share] = folders_of(info.spec)
    except InvalidInput:
        return info.name
    return next((each.journal for each in shares if each.covers(fragment.begin, fragment.end)), info.name)


def _with_store(info: JournalInfo, fragment: Fragment) -> Fragment:
    """Return the fragment in a store of its journal's spec: in its own store, or else in the first one."""
    urls = info.spec.fragment.stores
    if fragment.backing_store in urls or not urls:
        return fragment if fragment.backing_store in urls else replace(fragment, backing_store="")
    return replace(fragment, backing_store=urls[0])
