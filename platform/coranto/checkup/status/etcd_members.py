"""Reads keys from the first of several etcd members that answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import CorantoError, InvalidInput
from coranto.security.tls import ClientTls

T = TypeVar("T")


async def ask_members(
    etcd: str, tls: ClientTls | None, timeout: float, work: Callable[[EtcdCoordinator], Awaitable[T]]
) -> T:
    """Return the result of `work` with the first member that answers, of endpoints separated by commas.

    Each member has an equal part of `timeout` seconds. Raises the error of the last member, and InvalidInput if `etcd`
    names no endpoint.
    """
    endpoints = [each.strip() for each in etcd.split(",") if each.strip()]
    failure: CorantoError = InvalidInput(f"{etcd!r} names no endpoint; give host:port", field="etcd")
    for endpoint in endpoints:
        try:
            async with EtcdCoordinator(endpoint, tls=tls, timeout_seconds=timeout / len(endpoints)) as coordinator:
                return await work(coordinator)
        except CorantoError as error:
            failure = error
    raise failure
