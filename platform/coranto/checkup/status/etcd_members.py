"""Read keys from the first of several etcd members that answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from coranto.checkup.status.first_answer import first_answer
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import CorantoError, InvalidInput, Unavailable
from coranto.security.tls import ClientTls

T = TypeVar("T")


async def ask_members(
    etcd: str, tls: ClientTls | None, timeout: float, work: Callable[[EtcdCoordinator], Awaitable[T]]
) -> T:
    """Return the result of `work` with the first member that answers. `etcd` has endpoints separated by commas.

    After each second without an answer, the next member is also asked. Raises the error of the last member, Unavailable
    if none answers within `timeout` seconds, and InvalidInput if `etcd` names no endpoint.
    """

    async def ask(endpoint: str) -> T:
        async with EtcdCoordinator(endpoint, tls=tls, timeout_seconds=timeout) as coordinator:
            return await work(coordinator)

    endpoints = [each.strip() for each in etcd.split(",") if each.strip()]
    failure: CorantoError = Unavailable(f"no member of etcd at {etcd} answered within {timeout:g} s")
    if not endpoints:
        failure = InvalidInput(f"{etcd!r} names no endpoint; give host:port", field="etcd")
    return await first_answer([partial(ask, endpoint) for endpoint in endpoints], timeout, failure)
