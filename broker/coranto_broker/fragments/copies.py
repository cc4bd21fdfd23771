"""Copies of a fragment that other brokers of its journal hold in local files, for when ours is damaged."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from coranto.fragments.fragment import Fragment
from coranto_broker.spool.durable_spool import FETCHED, Sealed
from coranto_broker.spool.shared_file import SharedFile

_log = structlog.get_logger(__name__)


class Copies(Protocol):
    """Who else may have a fragment's content."""

    async def fetch(self, fragment: Fragment, target: SharedFile) -> str:
        """Write a good copy of the content to `target`, an empty file; returns the name of the broker that had it.

        It is empty when nobody has one; then `target` may hold anything. Raises OSError when writing fails.
        """
        ...


async def mend(sealed: Sealed, copies: Copies) -> str:
    """Put a good copy in the place of damaged content that was set aside. Returns who had it, empty if nobody."""
    fetched = sealed.content.beside(sealed.content.path.name + FETCHED)
    try:
        source = await copies.fetch(sealed.fragment, fetched)
        if source and not sealed.content.discarded:
            await asyncio.to_thread(fetched.sync)
            sealed.content.put_in(fetched)
        return source
    finally:
        if not fetched.discarded:
            fetched.discard()
