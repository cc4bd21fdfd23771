"""Channels to endpoints: one for each, and closed when there are many."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio

from coranto.client.channels import MAX_CHANNELS, Channels


class Channel:
    def __init__(self) -> None:
        self.closed = False

    async def close(self, grace: float | None) -> None:
        self.closed = True


class Opened(list[Channel]):
    def __call__(self, endpoint: str) -> grpc.aio.Channel:
        self.append(Channel())
        return cast(grpc.aio.Channel, self[-1])


async def test_there_is_one_channel_to_an_endpoint() -> None:
    opened = Opened()
    channels = Channels(opened)
    first: Any = channels.get("http://one:80")
    assert channels.get("http://one:80") is first
    assert channels.get("http://two:80") is not first
    await channels.close()
    assert [channel.closed for channel in opened] == [True, True]
    again: Any = channels.get("http://one:80")
    assert again is opened[2]


async def test_unused_channels_are_closed_when_there_are_many() -> None:
    opened = Opened()
    channels = Channels(opened)
    for number in range(MAX_CHANNELS):
        channels.get(f"http://broker-{number}:80")
    channels.get("http://broker-0:80")
    channels.get("http://broker-new:80")
    await asyncio.sleep(0)
    assert [number for number, channel in enumerate(opened) if channel.closed] == [1]
    await asyncio.sleep(0)
    assert channels._draining == set()
    await channels.close()
    assert all(channel.closed for channel in opened)
