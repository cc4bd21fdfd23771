"""The folders of journals in fragment stores: one broker's listing, marking and choice of postfixes.

`coranto.fragments.journal_folders` has the rules. This module adds the existing journals, from the mirrored key space,
and keeps the results of listings for the persister.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from coranto.errors import CorantoError
from coranto.fragments.forks import folders_of, without_expired_shares
from coranto.fragments.fragment import Fragment
from coranto.fragments.journal_folders import FolderListing, owner_of
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto.wire import protocol_pb2 as pb

_log = structlog.get_logger(__name__)


class JournalFolders:
    """Lists journals, marks their folders, and drops postfixes that lead into another journal's folder."""

    def __init__(self, stores: StoreRegistry, names_below: Callable[[str], Iterable[str]] = lambda journal: ()) -> None:
        """`names_below` returns the names of existing journals that nest below a journal's name."""
        self._stores = stores
        self._names_below = names_below
        self._others: dict[tuple[str, str], frozenset[str]] = {}  # By store and journal.
        self._unmarked: dict[tuple[str, str], frozenset[str]] = {}
        self._marked: set[tuple[str, str]] = set()

    async def listed(self, spec: pb.JournalSpec, now: float) -> list[Fragment]:
        """List a journal's fragments, including those that it shares as a fork, at wall time `now` in seconds.

        Raises like `fragments`, even if only the folder of a shared journal cannot be listed: otherwise, a fork with
        missing content would look complete. Raises InvalidInput for invalid labels of a fork.
        """
        found: list[Fragment] = []
        for folder in folders_of(spec):
            listed = await self.fragments(folder.journal, spec.fragment.stores)
            found += filter(folder.contains, listed)
        return without_expired_shares(spec, found, now)

    async def fragments(self, journal: str, urls: Iterable[str]) -> list[Fragment]:
        """List the journal's own fragments in some stores. Raises StoreError, or InvalidInput for an invalid URL."""
        own: list[Fragment] = []
        for url in urls:
            found = await self._stores.get(url).listing(journal, lambda: self._names_below(journal))
            own.extend(found.fragments)
            self._note(journal, url, found)
        return own

    def _note(self, journal: str, url: str, found: FolderListing) -> None:
        for folder in sorted(found.others - self._others.get((url, journal), frozenset())):
            _log.warning(
                "folder.nested_journal_skipped",
                journal=journal,
                other=f"{journal}/{folder}",
                store=url,
            )
        for noted, folders in ((self._others, found.others), (self._unmarked, found.unmarked)):
            if folders:
                noted[url, journal] = folders
            else:
                noted.pop((url, journal), None)

    async def mark_listed(self, journal: str, urls: Iterable[str]) -> None:
        """Mark the folders that the last listing found without a marker: the journal's and those nested in it."""
        for url in urls:
            for folder in sorted(self._unmarked.pop((url, journal), ())):
                await self._mark(self._stores.get(url), f"{journal}/{folder}" if folder else journal)

    async def mark(self, journal: str, url: str) -> None:
        """Mark the journal's folder unless this process has done so. Call it before anything is stored there."""
        if (url, journal) not in self._marked:
            await self._mark(self._stores.get(url), journal)

    async def _mark(self, store: FragmentStore, journal: str) -> None:
        """Mark a folder. A failure is logged and retried later, because it must not prevent storing or listing."""
        try:
            await store.mark(journal)
        except CorantoError as error:
            _log.warning("folder.marking_failed", journal=journal, store=store.url, error=str(error))
        else:
            self._marked.add((store.url, journal))

    def own_postfix(self, journal: str, url: str, postfix: str) -> str:
        """Return the postfix to store a fragment with, or "" if `postfix` leads into another journal's folder."""
        if not postfix:
            return postfix
        folder = f"{journal}/"
        roots = {name.removeprefix(folder) for name in self._names_below(journal)}
        owner = owner_of(postfix, roots | self._others.get((url, journal), frozenset()))
        if owner is None:
            return postfix
        _log.warning(
            "folder.postfix_omitted",
            journal=journal,
            postfix=postfix,
            other=folder + owner,
        )
        return ""
