"""Stray objects: stored fragments far above a journal, which make it refuse appends. Pure.

The cause is a file in the wrong folder, or with a wrong name. Brokers use the file's end as the journal's head, and
refuse appends, because they do not have the content below it. An object is a stray if

* brokers refuse appends for that reason, and have content of their own that is not stored yet,
* it begins above that content and above the head that audits know, with a gap below it, and
* no audit knows it.

Brokers that have lost their content, and whose stores are correct, do not match: they have no content of their own.
"""

from __future__ import annotations

from dataclasses import replace

from coranto.audit.gathered_journal import GatheredJournal, known
from coranto.audit.remembered import JournalRecord
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb


def strays_of(present: GatheredJournal, before: JournalRecord | None) -> list[Fragment]:
    """Return the strays among stored objects, and among deleted ones that brokers still list."""
    if present.head.append_status != pb.INDEX_HAS_GREATER_OFFSET or not present.live:
        return []
    reach = max(each.end for each in present.live)
    remembered = set()
    if before is not None and before.create_revision == present.info.create_revision:
        reach = max(reach, before.head)
        remembered = {each.key for each in before.fragments}
    stored = [*present.objects, *present.gone]
    return [each for each in stored if each.begin > reach and known(each).key not in remembered]


def without_strays(present: GatheredJournal, strays: list[Fragment]) -> GatheredJournal:
    """Return the state without these strays."""
    if not strays:
        return present
    names = {(each.backing_store, each.content_path) for each in strays}

    def kept(fragments: list[Fragment]) -> list[Fragment]:
        return [each for each in fragments if (each.backing_store, each.content_path) not in names]

    index = kept([*present.index])
    head = replace(
        present.head,
        head=max((each.end for each in index), default=0),
        persisted_head=max((each.end for each in index if each.backing_store), default=0),
    )
    return replace(present, head=head, index=index, objects=kept([*present.objects]), gone=kept([*present.gone]))
