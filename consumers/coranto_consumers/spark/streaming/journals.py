"""The journals of a streaming query, as they are now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from coranto.client import SyncJournalClient
from coranto.errors import CorruptData
from coranto_consumers.spark.journals.discovery import ContentExtent, contents
from coranto_consumers.spark.journals.fetching import task_client
from coranto_consumers.spark.journals.losses import LostContent, lost_before
from coranto_consumers.spark.journals.segments import when_sealed
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.streaming.offsets import Position

_IDLE_SECONDS: Final = 0.1
"""The least time between two questions for heads. Spark itself would ask without a pause."""


class QueryJournals:
    """Finds the journals that a query selects, and their extents. Connects on first use."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client: SyncJournalClient | None = None
        self._asked = 0.0
        self.heads: dict[str, ContentExtent] = {}
        """The last answer."""

    @property
    def client(self) -> SyncJournalClient:
        if self._client is None:
            self._client = task_client(self._options.client, self._options.cache_bytes)
        return self._client

    def ask(self) -> dict[str, ContentExtent]:
        self.heads = contents(self.client, self._options.selected.list(self.client, self._options.labels))
        self._asked = time.monotonic()
        return self.heads

    def ask_again(self) -> dict[str, ContentExtent]:
        """Ask like `ask`, but not too soon after the last time."""
        since = time.monotonic() - self._asked
        if since < _IDLE_SECONDS:
            time.sleep(_IDLE_SECONDS - since)
        return self.ask()

    def ask_for_all(self) -> dict[str, ContentExtent]:
        """Ask until all of it can be read now. Raises StreamChanged (`when_sealed`)."""
        return when_sealed(self.ask, self._options.client.retry_timeout)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def lost_at(journal: str, position: Position, found: ContentExtent | None) -> LostContent | None:
    """Return the lost content between a position and a journal's next content. `found` is None without the journal."""
    if found is None:
        return LostContent(journal, position.offset, 0, made_again=True)
    if not position.is_of(found.created, found.journal_id):
        ids = (position.journal_id, found.journal_id)
        return LostContent(journal, position.offset, found.head, True, *(ids if all(ids) else (None, None)))
    return lost_before(journal, position.offset, found.begin, found.head, is_end=found.is_end)


def require(journal: str, position: Position, heads: Mapping[str, ContentExtent]) -> None:
    """Raise an error if a journal does not have the content from a position on."""
    found = heads.get(journal)
    if found is None:
        raise CorruptData(
            f"journal {journal} is read through {position.offset}, and is not there any more, or not selected. "
            "Select it again, or begin a new query, with a new checkpoint"
        )
    lost = lost_at(journal, position, found)
    if lost is None:
        return
    advice = "Begin a new query, with a new checkpoint"
    if lost.known:
        advice += (
            ", or continue without (failOnDataLoss=false). If the present journal has the content of the earlier one "
            "up to that offset, such as recovered content, set the option "
            f"acceptJournals={lost.found}/{journal} of the source, and start the query with the same checkpoint."
        )
    raise lost.error(advice)
