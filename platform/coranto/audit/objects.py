"""Findings about a journal's files in its stores: missing, replaced, unknown or inconsistent with their names. Pure."""

from __future__ import annotations

from collections import defaultdict

from coranto.audit.compared import ComparedJournal
from coranto.audit.findings import Fact, Kind, Severity
from coranto.audit.gathered_journal import known
from coranto.audit.losses import Spans, merged, overlaps, within
from coranto.fragments.fragment import Fragment

_SHOWN = 5


def report_missing(journal: ComparedJournal, spans: Spans) -> None:
    """Report fragments that are in the index but not in their stores, unless retention has just removed them."""
    there = merged(spans)
    for each in journal.present.gone:
        is_lost = overlaps((each.begin, each.end), journal.lost)
        if not is_lost and not within((each.begin, each.end), there):
            continue
        journal.find(
            Kind.FRAGMENT_MISSING,
            Severity.ERROR if is_lost else Severity.WARNING,
            f"the brokers' index names {each.content_path}, and {each.backing_store} does not have it"
            + ("" if is_lost else "; other fragments have its content"),
            _facts(each),
        )


def report_unstored(journal: ComparedJournal, stored: Spans) -> None:
    """Report fragments that a store has lost, and whose content only brokers have."""
    keys, there = {known(each).key for each in journal.checked_objects.stored}, merged(stored)
    live = [(each.begin, each.end) for each in journal.present.live]
    for old in journal.before.fragments if journal.before is not None else []:
        if not old.stored or old.bad or old.lost_since or old.key in keys:
            continue
        if overlaps((old.begin, old.end), journal.lost) or within((old.begin, old.end), there):
            continue
        if overlaps((old.begin, old.end), live):
            journal.find(
                Kind.FRAGMENT_MISSING,
                Severity.WARNING,
                f"the store has lost [{old.begin}, {old.end}) with the SHA-1 {old.sum}. "
                "A broker still has the content and stores it again, unless that broker ends first",
                {"span": [old.begin, old.end], "sum": old.sum},
            )


def report_replaced(journal: ComparedJournal) -> None:
    """Report objects of the same offsets with different SHA-1s: at most one of them is the journal's content."""
    sums: dict[tuple[int, int], set[str]] = defaultdict(set)
    for each in journal.checked_objects.stored:
        if not journal.is_bad(each):  # `report_misnamed` reports bad files.
            sums[each.begin, each.end].add(each.sum.hex())
    before: dict[tuple[int, int], set[str]] = defaultdict(set)
    for old in journal.before.fragments if journal.before is not None else []:
        if not old.lost_since and not old.bad:
            before[old.begin, old.end].add(old.sum)
    for (begin, end), found in sorted(sums.items()):
        was = ", ".join(sorted(before.get((begin, end), ())))
        if was and not found & before[begin, end]:
            journal.replaced.update((begin, end, each) for each in before[begin, end])
            journal.find(
                Kind.CONTENT_REPLACED,
                Severity.ERROR,
                f"[{begin}, {end}) had the SHA-1 {was} and is stored with {', '.join(sorted(found))}: content that "
                "was there was replaced by other content. Restore the fragment from a copy of the store, or accept "
                "it (coranto audit --accept)",
                {"span": [begin, end], "sum_before": was, "sums": sorted(found)},
            )
        elif len(found) > 1:
            journal.find(
                Kind.CONTENT_REPLACED,
                Severity.ERROR,
                f"[{begin}, {end}) is stored {len(found)} times with different SHA-1s "
                f"({', '.join(sorted(found))}): at most one is the journal's. A deep audit finds which contradict "
                "their own names; remove those",
                {"span": [begin, end], "sums": sorted(found)},
            )

    for old, digest in journal.present.reassigned:
        journal.find(
            Kind.CONTENT_REPLACED,
            Severity.ERROR,
            f"[{old.begin}, {old.end}) had the SHA-1 {old.sum} at brokers at the last audit, and has {digest} now: "
            "these offsets were given out twice, and readers may have seen both contents",
            {"span": [old.begin, old.end], "sum_before": old.sum, "sums": [digest]},
        )


def report_misnamed(journal: ComparedJournal) -> None:
    """Report files whose names are wrong, and fragments that the brokers' index does not cover."""
    for each in journal.checked_objects.implausible:
        journal.find(
            Kind.CONTENT_DIFFERS,
            Severity.ERROR,
            f"{each.content_path} in {each.backing_store} has {each.file_bytes} bytes, which cannot hold the "
            f"{each.length} bytes of content that its name states. Restore it from a copy, or remove it",
            _facts(each),
        )
    for each in journal.checked_objects.stored:
        if journal.is_bad(each):
            now = journal.present.bad.get(known(each).key)
            journal.find(
                Kind.CONTENT_DIFFERS,
                Severity.ERROR,
                now or f"{journal.bad[known(each).key].bad} (as an earlier audit read it)",
                _facts(each),
            )
    if journal.present.unlisted or journal.present.problem or not journal.present.head.known:
        return  # The brokers' index is not known, or not all objects are.
    for each in journal.strays:
        is_there = each.content_path not in journal.vanished
        advice = (
            f"{each.backing_store} has it. If it is not the journal's, move it out of its folder: nothing is lost"
            if is_there
            else "It is gone from its store, so brokers forget it when they list the store again"
        )
        journal.find(
            Kind.OBJECT_UNKNOWN,
            Severity.ERROR,
            f"{each.content_path} begins far above the journal's content, and no audit knows it. Brokers take its end "
            f"for the journal's head, and so refuse appends. {advice}",
            {**_facts(each), "stray": True, "stored": is_there},
        )
    index = merged((entry.begin, entry.end) for entry in journal.present.index)
    for each in journal.checked_objects.stored:
        if not within((each.begin, each.end), index):
            journal.find(
                Kind.OBJECT_UNKNOWN,
                Severity.WARNING,
                f"{each.backing_store} has {each.content_path}, and the brokers' index covers none or only a part "
                "of it. Brokers may list the store later; if the object stays unknown, another program put it there",
                _facts(each),
            )
    if journal.present.unreadable:
        paths = [path for path, _ in journal.present.unreadable]
        journal.find(
            Kind.OBJECT_MISNAMED,
            Severity.WARNING,
            f"{len(paths)} files in its folder have names that are not fragments', so they are ignored: "
            f"{', '.join(paths[:_SHOWN])}. Remove them, or give a fragment its name back",
            {"paths": paths},
        )


def _facts(fragment: Fragment) -> dict[str, Fact]:
    return {
        "fragment": fragment.content_path,
        "store": fragment.backing_store,
        "span": [fragment.begin, fragment.end],
    }
