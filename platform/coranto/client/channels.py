"""Channels to the other members of a cluster, whose endpoints change."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import grpc.aio

MAX_CHANNELS: Final = 256
_DRAIN_SECONDS: Final = 3600.0


class Channels:
    """One channel for each endpoint. Beyond MAX_CHANNELS, the least recently used one is closed."""

    def __init__(
        self,
        open: Callable[[str], grpc.aio.Channel],
        basis: Callable[[str], object] = lambda endpoint: None,
        draining: Callable[[grpc.aio.Channel], None] = lambda channel: None,
    ) -> None:
        """`open` opens a channel to an endpoint; it is called again when `basis` returns another object than before.

        `draining` is called with each channel that gets no more calls, and that closes when its calls have ended.
        """
        self._open = open
        self._basis = basis
        self._on_draining = draining
        self._bases: dict[str, object] = {}
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._draining: set[asyncio.Task[None]] = set()

    def get(self, endpoint: str) -> grpc.aio.Channel:
        """Return the channel to an endpoint. Raises the errors of `open`."""
        channel, basis = self._channels.get(endpoint), self._basis(endpoint)
        if channel is None or basis is not self._bases[endpoint]:
            if channel is not None:
                self._drain(channel)
            channel = self._channels[endpoint] = self._open(endpoint)
            self._bases[endpoint] = basis
            while len(self._channels) > MAX_CHANNELS:
                unused, last = self._channels.popitem(last=False)
                del self._bases[unused]
                self._drain(last)
        self._channels.move_to_end(endpoint)
        return channel

    def _drain(self, channel: grpc.aio.Channel) -> None:
        """Close a channel when its calls have ended."""
        self._on_draining(channel)
        task = asyncio.ensure_future(channel.close(_DRAIN_SECONDS))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def close(self) -> None:
        """Close all channels, and cancel their calls."""
        channels, self._channels = self._channels, OrderedDict()
        for draining in self._draining:
            draining.cancel()
        await asyncio.gather(
            *self._draining, *(channel.close(None) for channel in channels.values()), return_exceptions=True
        )
