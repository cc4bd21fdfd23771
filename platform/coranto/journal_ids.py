"""Ids of journals, and the content that two journals of the same name share according to their ids.

A journal's id is `<cluster>-<create revision>`, the revision in hexadecimal digits. If no broker can recover lost
content and an operator lets the journal continue (`coranto journals reset-head`), the journal's head falls, and the
offsets above it are written again with other content. So its id changes too. Each fall adds a part:

    5d3c7a-1f_4096.2b    5d3c7a-1f_4096.2b_512.9c

A part is the head's offset after the fall, and the etcd revision of the fall, in hexadecimal digits. Two journals have
the same content up to the least offset among the parts that only one of their ids has. (Kafka's leader epochs and
their first offsets serve the same purpose, KIP-320.) Pure.
"""

from __future__ import annotations

from typing import Final

_FALL: Final = "_"
_MAX_FALLS: Final = 16
EVERYTHING: Final = (1 << 63) - 1


def first_id(cluster: str, create_revision: int) -> str:
    """Return the id of a journal that was created in this cluster. Empty if the cluster is unknown."""
    return f"{cluster}-{create_revision:x}" if cluster else ""


def fallen_id(journal_id: str, offset: int, revision: int) -> str:
    """Return the new id of a journal whose head fell to an offset. Empty if `journal_id` is empty.

    Positions with the earlier id stay valid up to that offset. After 16 falls the id starts over, and none stay valid.
    """
    root, *falls = journal_id.split(_FALL)
    if not journal_id:
        return ""
    if len(falls) >= _MAX_FALLS:
        return first_id(root.rpartition("-")[0], revision)
    return f"{journal_id}{_FALL}{offset}.{revision:x}"


def shared_through(known: str, found: str) -> int | None:
    """Return the end offset of the content that journals with these ids share; None if they share none.

    An unknown (empty) id is assumed to equal the other one.
    """
    if not known or not found or known == found:
        return EVERYTHING
    one, other = known.split(_FALL), found.split(_FALL)
    if one[0] != other[0]:
        return None
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    falls = [part.partition(".")[0] for part in (*one[same:], *other[same:])]
    return min(int(offset) for offset in falls) if all(map(str.isdecimal, falls)) else None


def is_same(known: str, offset: int, found: str) -> bool:
    """Return True if a journal with the id `found` has the content up to `offset` of the one with the id `known`."""
    through = shared_through(known, found)
    return through is not None and offset <= through


def held_through(known: str, offset: int, found: str) -> int:
    """Return the end offset of the content read up to `offset` that a journal with the id `found` still has.

    It is `offset` if nothing is missing, less if the journal's head fell since, and 0 for another journal, or if an id
    is unknown.
    """
    through = shared_through(known, found) if known and found else None
    return min(offset, through or 0)


def latest_id(known: str, found: str) -> str:
    """Return the later of two ids of one journal. A broker may not know about a fall yet."""
    return known if not found or known.startswith(found + _FALL) else found


def same_journal(created: int, journal_id: str, offset: int, present_created: int, present_id: str) -> bool:
    """Return False if known facts show that a journal does not have the content up to `offset` of an earlier one.

    Compares their ids. If one of these is unknown (empty), compares the etcd revisions that created the journals
    (0: unknown). Unlike an id, such a revision changes when a journal is applied again after a restore of etcd.
    """
    if journal_id and present_id:
        return is_same(journal_id, offset, present_id)
    return not created or not present_created or created == present_created
