"""Examine the brokers that a client reaches: their answers, versions and clocks."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from typing import Final

from coranto.checkup.clock import clock_result
from coranto.checkup.results import Examination, good, problem, warning
from coranto.client import ClientConfig, JournalClient
from coranto.errors import CorantoError, PermissionDenied, Unauthenticated

NONE: Final = "name=coranto/no-such-journal"
"""A selector that matches no journal."""


async def brokers(config: ClientConfig) -> list[Examination]:
    """Examine the brokers of an endpoint, and all brokers that they name."""
    mine = importlib.metadata.version("coranto")
    results = [good("client's version", mine)]
    endpoints = [each.strip() for each in config.endpoint.split(",")]
    try:
        async with JournalClient.of(config) as client:
            listing = await client.list()
    except CorantoError as error:
        return [*results, problem("brokers", str(error), advice_for(error))]
    results.append(good("brokers", f"answer, and have {len(listing.journals)} journals that this client may see"))
    for journal in listing.journals:
        endpoints += [each for each in journal.route.endpoints if each]
    seen: set[str] = set()
    for endpoint in endpoints:
        plain = endpoint.removeprefix("http://")
        if plain not in seen:
            seen.add(plain)
            results += await _broker(dataclasses.replace(config, endpoint=endpoint), mine)
    return results


async def _broker(config: ClientConfig, mine: str) -> list[Examination]:
    subject = f"broker {config.endpoint}"
    try:
        async with JournalClient.of(config) as client:
            await client.heads(NONE)  # Connect before measuring.
            before = time.time()
            heads = await client.heads(NONE)
            after = time.time()
    except CorantoError as error:
        return [problem(subject, str(error), advice_for(error))]
    if not heads.broker_version:
        return [
            warning(subject, "reports no version", "it is one of Gazette's, or an early one of Coranto's: upgrade that")
        ]
    if heads.broker_version != mine:
        advice = "during an upgrade this is fine: brokers first, then clients; afterwards give all the same version"
        return [warning(subject, f"has version {heads.broker_version}, the client has {mine}", advice)]
    difference = heads.broker_time - (before + after) / 2
    return [good(subject, f"has version {mine}"), clock_result(subject, difference, (after - before) / 2)]


def advice_for(error: CorantoError) -> str:
    """Return the remedy for a broker that does not answer, or refuses."""
    if isinstance(error, Unauthenticated | PermissionDenied):
        return "give a token that is valid now in $CORANTO_AUTH_TOKEN, or keys in $CORANTO_AUTH_KEYS"
    return (
        "is the broker up (its /ready), is the port open from here, and does it advertise an address that this machine "
        "can reach (--advertise)? For TLS set $CORANTO_TLS_CA"
    )
