"""Copies of a fragment in local files of the journal's other brokers, to replace a damaged local file."""

from __future__ import annotations

import asyncio
from typing import Protocol

from coranto.fragments.fragment import Fragment
from coranto_broker.spool.durable_spool import FETCHED, Sealed
from coranto_broker.spool.shared_file import SharedFile


class Copies(Protocol):
    """Access to other brokers' copies of a fragment's content."""

    async def fetch(self, fragment: Fragment, target: SharedFile) -> str:
        """Write a good copy of the content to the empty file `target`, and return the name of the broker that had it.

        Returns "" when no broker has one; `target` may then hold anything. Raises OSError when writing fails.
        """
        ...


async def restore(sealed: Sealed, copies: Copies) -> str:
    """Replace quarantined content by a good copy. Returns the name of the broker that had it, or "" if none has."""
    fetched = sealed.content.sibling(sealed.content.path.name + FETCHED)
    try:
        source = await copies.fetch(sealed.fragment, fetched)
        if source and not sealed.content.discarded:
            await asyncio.to_thread(fetched.sync)
            sealed.content.replace_with(fetched)
        return source
    finally:
        if not fetched.discarded:
            fetched.discard()
