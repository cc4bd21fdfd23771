"""The newest message of a journal that meets a condition, found from the journal's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from coranto.client import SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.messages.framing import JsonLines

_FIRST_BYTES: Final = 1 << 20
_GROWTH: Final = 4


def newest(client: SyncJournalClient, journal: str, fits: Callable[[Any], bool]) -> Any | None:
    """Return the last committed message that fits, or None. Raises JournalNotFound and errors of reads.

    The last MiB is read first, then four times as much, until a message fits.
    """
    head, size = client.head(journal), _FIRST_BYTES
    while True:
        begin = _line_after(client, journal, head - size, head)
        found = [each.message for each in committed_messages(client, journal, JsonLines(), begin=begin, end=head)]
        for message in reversed(found):
            if fits(message):
                return message
        if not begin:
            return None
        size *= _GROWTH


def _line_after(client: SyncJournalClient, journal: str, offset: int, head: int) -> int:
    """Return the offset of the first line that begins after `offset`; 0 if `offset` is not above 0."""
    if offset <= 0:
        return 0
    for chunk in client.read(journal, offset, end_offset=head):
        end = chunk.content.find(b"\n")
        if end >= 0:
            return int(chunk.offset + end + 1)
    return head
