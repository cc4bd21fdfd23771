"""The deep part of an audit: reads content and verifies its SHA-1, up to a budget of bytes.

Stored fragments of all selected journals are read in the order of their last verification: first fragments that were
bad, then unread ones, then the least recently read. So successive audits rotate over everything. Every deep audit reads
the spool of each replica. Content that an earlier audit missed is read again if other fragments cover it now.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from coranto.audit.content import uncovered
from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject
from coranto.audit.gathered_journal import GatheredJournal, check_file_lengths, known
from coranto.audit.gathering import CONCURRENCY
from coranto.audit.remembered import JournalRecord, Key, KnownFragment
from coranto.audit.torn import Torn, TornSearch, search
from coranto.client import ClientConfig, JournalClient
from coranto.client.values import JournalInfo
from coranto.effects import Clock
from coranto.errors import CorantoError, CorruptFragment, FragmentNotFound, StoreError
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.telemetry import ProgressReport, amount

RECHECK_BYTES: Final = 64 << 20
"""The maximum length of a span that is read again, outside the budget, to compare it with an earlier audit."""
RECHECK_SECONDS: Final = 30.0


@dataclass(slots=True)
class DeepResult:
    """The results of reading. `verified` and `bad` have stored fragments by journal, with the time or the fault."""

    findings: list[Finding] = field(default_factory=list)
    verified: dict[str, dict[Key, float]] = field(default_factory=dict)
    bad: dict[str, dict[Key, str]] = field(default_factory=dict)
    read_bytes: int = 0
    left_bytes: int = 0
    spool_bytes: int = 0


async def read_stored(
    stores: StoreRegistry,
    journals: list[GatheredJournal],
    records: Mapping[str, JournalRecord],
    budget: int | None,
    clock: Clock,
    progress: ProgressReport | None = None,
) -> DeepResult:
    """Read up to `budget` bytes of stored fragments (None: all), beginning with the least recently read.

    At least one fragment is read, however large. A fragment that cannot be read is a finding.
    """
    result = DeepResult()
    torn: dict[str, Torn] = {}
    specs = {each.journal: each.info.spec for each in journals}
    queue: list[tuple[float, str, Fragment]] = []
    for present in journals:
        record = records.get(present.journal)
        remembered = {each.key: each for each in (record.fragments if record is not None else [])}
        for fragment in check_file_lengths(present.objects).stored:
            last = remembered.get(known(fragment).key)
            at = 0.0 if last is None or last.bad else last.verified_at
            queue.append((at if last is None or not last.bad else -1.0, present.journal, fragment))
    for _, journal, fragment in sorted(queue, key=lambda each: (each[0], each[1], each[2].begin)):
        if budget is not None and result.read_bytes and result.read_bytes + fragment.length > budget:
            result.left_bytes += fragment.length
            continue
        result.read_bytes += fragment.length
        if progress is not None:
            progress.note(f"read {amount(result.read_bytes, 'bytes')} of stored content")
        subject = Subject.journal(journal)
        facts: dict[str, Fact] = {
            "fragment": fragment.content_path,
            "store": fragment.backing_store,
            "span": [fragment.begin, fragment.end],
        }
        try:
            content = await stores.get(fragment.backing_store).read(fragment)
        except CorruptFragment as error:
            result.bad.setdefault(journal, {})[known(fragment).key] = str(error)
        except FragmentNotFound:
            continue  # Removed since the listing, perhaps by retention. The next audit judges that.
        except StoreError as error:
            message = f"{fragment.content_path} in {fragment.backing_store} cannot be read: {error}"
            result.findings.append(Finding(Kind.CONTENT_UNREADABLE, Severity.ERROR, subject, message, facts))
        else:
            result.verified.setdefault(journal, {})[known(fragment).key] = clock.now()
            found = torn.setdefault(journal, Torn(journal))
            await search(specs[journal], fragment.begin, content, found)
    result.findings += [each.finding() for each in torn.values() if each.count]
    return result


async def read_spools(
    config: ClientConfig | None, client: JournalClient, journals: list[GatheredJournal]
) -> DeepResult:
    """Read the spool of every replica, and compare its SHA-1 with the replica's report.

    With `config`, reads from each replica at its own endpoint. Without it, reads from one replica through `client`.
    """
    result = DeepResult()
    clients: dict[str, JournalClient] = {}
    gate = asyncio.Semaphore(CONCURRENCY)

    def client_of(single: ClientConfig, endpoint: str) -> JournalClient:
        if endpoint not in clients:
            clients[endpoint] = JournalClient.of(
                replace(single, endpoint=endpoint, route_cache=0, retry_timeout=min(single.retry_timeout, 5.0))
            )
        return clients[endpoint]

    async def one(present: GatheredJournal) -> DeepResult:
        found = DeepResult()
        if not present.head.known:
            return found
        async with gate:
            # Replicas have the same content, so only the first one is searched for torn messages.
            torn: Torn | None = Torn(present.journal)
            if config is None or not present.info.route.endpoints:
                await _read_live(client, present.info, present.live, "", found, torn)
                return found
            for endpoint in filter(None, present.info.route.endpoints):
                await _read_replica(client_of(config, endpoint), endpoint, present.info, found, torn)
                torn = None
        return found

    try:
        for found in await asyncio.gather(*map(one, journals)):
            result.findings += found.findings
            result.spool_bytes += found.spool_bytes
    finally:
        for each in clients.values():
            await each.close()
    return result


async def _read_replica(
    client: JournalClient, endpoint: str, info: JournalInfo, result: DeepResult, torn: Torn | None
) -> None:
    try:
        listed = [each.fragment for each in await client.fragments(info.name)]
    except CorantoError as error:
        message = f"the replica at {endpoint} does not list its fragments, so its spool was not read: {error}"
        result.findings.append(
            Finding(Kind.NOT_EXAMINED, Severity.ERROR, Subject.journal(info.name), message, {"endpoint": endpoint})
        )
        return
    live = [each for each in listed if not each.backing_store and each.length]
    await _read_live(client, info, live, endpoint, result, torn)


async def _read_live(
    client: JournalClient,
    info: JournalInfo,
    live: list[Fragment],
    endpoint: str,
    result: DeepResult,
    torn: Torn | None,
) -> None:
    for fragment in live:
        looking = TornSearch(info.spec, fragment.begin, torn) if torn is not None else None
        problem = await _compare(client, fragment, fragment.sum, looking)
        result.spool_bytes += fragment.length
        if problem:
            where = f"the replica at {endpoint}" if endpoint else "a broker"
            message = (
                f"{where} has damaged content at [{fragment.begin}, {fragment.end}), and no store has it yet: "
                f"{problem}. Another replica may have good content: stop this broker, so that another one takes over"
            )
            facts: dict[str, Fact] = {"endpoint": endpoint, "span": [fragment.begin, fragment.end]}
            result.findings.append(
                Finding(Kind.SPOOL_DIFFERS, Severity.ERROR, Subject.journal(info.name), message, facts)
            )
    if torn is not None and torn.count:
        result.findings.append(torn.finding())


async def _compare(client: JournalClient, fragment: Fragment, wanted: bytes, looking: TornSearch | None) -> str:
    """Return the problem of a fragment's content as a broker serves it; "" if its SHA-1 is `wanted`."""
    sha = hashlib.sha1(usedforsecurity=False)
    reached = fragment.begin
    try:
        async for chunk in client.read(
            fragment.journal, fragment.begin, end_offset=fragment.end, direct=False, fail_on_jump=True
        ):
            sha.update(chunk.content)
            if looking is not None:
                looking.feed(chunk.content)
            reached = chunk.end
    except CorantoError as error:
        return f"it cannot be read: {error}"
    if reached != fragment.end:
        return f"it was served only up to offset {reached}"
    if looking is not None:
        looking.finish()
    return "" if sha.digest() == wanted else f"its SHA-1 is {sha.hexdigest()}, and should be {wanted.hex()}"


async def found_again(client: JournalClient, present: GatheredJournal, record: JournalRecord | None) -> frozenset[Key]:
    """Return the missed fragments of a record whose exact content other fragments have now."""
    if record is None or not present.head.known:
        return frozenset()
    keys = present.keys
    missed = [each for each in record.fragments if each.lost_since and each.key not in keys]
    return frozenset([each.key for each in missed if await _digest(client, present, each) == each.sum])


async def _digest(client: JournalClient, present: GatheredJournal, fragment: KnownFragment) -> str:
    """Return the current SHA-1 of a fragment's span; "" if it is incomplete, too large or not readable."""
    if fragment.end - fragment.begin > RECHECK_BYTES or uncovered(present.spans, fragment.begin, fragment.end):
        return ""
    try:
        async with asyncio.timeout(RECHECK_SECONDS):
            content = await client.read_all(present.journal, fragment.begin, fragment.end)
    except (CorantoError, TimeoutError):
        return ""  # The judgement reports it as missing.
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


async def fragments_with_new_content(
    client: JournalClient, present: GatheredJournal, record: JournalRecord | None
) -> list[tuple[KnownFragment, str]]:
    """Return fragments that only brokers had at the last audit and whose content has changed, with its new SHA-1.

    Such a fragment was completed since and stored under another name, so only its content shows whether brokers
    assigned its offsets twice.
    """
    if record is None or not present.head.known or record.create_revision != present.info.create_revision:
        return []
    keys, found = present.keys, []
    for each in record.fragments:
        if each.stored or each.lost_since or each.key in keys:
            continue
        digest = await _digest(client, present, each)
        if digest and digest != each.sum:
            found.append((each, digest))
    return found
