"""Have a broker probe the fragment stores of journals, and find the last audits in them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Final

from coranto.audit.memory import last_saved
from coranto.checkup.results import Examination, absent, good, problem
from coranto.checkup.status.values import AuditState
from coranto.client import JournalClient, JournalInfo
from coranto.errors import CorantoError, PermissionDenied, StoreUnhealthy
from coranto.fragments.stores import StoreRegistry

MAX_STORES: Final = 32
"""The maximum number of stores that are probed, beginning with the stores of the most journals."""
_CONCURRENCY: Final = 8


def stores_of(journals: Iterable[JournalInfo]) -> Counter[str]:
    """Return the number of journals of each store."""
    return Counter(url for info in journals for url in info.spec.fragment.stores)


async def probe_stores(client: JournalClient, stores: Counter[str], timeout: float) -> list[Examination]:
    """Have a broker write to each store and read from it, for up to `timeout` seconds each."""
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def one(url: str, count: int) -> Examination:
        subject, users = f"store {url}", f"{count:,} journal{'' if count == 1 else 's'}"
        try:
            async with gate, asyncio.timeout(timeout):
                await client.store_health(url)
        except TimeoutError:
            found = f"a broker's probe did not end within {timeout:g} s ({users})"
            return problem(subject, found, "is the store reachable from the brokers, and fast?")
        except StoreUnhealthy as error:
            advice = "repair the store, or the brokers' access to it: content waits on the brokers' disks"
            return problem(subject, f"{' '.join(error.detail.split())} ({users})", advice)
        except PermissionDenied as error:
            return absent(subject, str(error), "use a token with READ or APPLY for the journals of this store")
        except CorantoError as error:
            return problem(subject, f"no broker could probe it: {error}", "see the brokers' problems first")
        return good(subject, f"healthy ({users})")

    results = list(await asyncio.gather(*(one(url, count) for url, count in stores.most_common(MAX_STORES))))
    if len(stores) > MAX_STORES:
        found = f"{len(stores) - MAX_STORES} more stores were not probed"
        results.append(absent("stores", found, "probe one with `coranto journals store-health URL`"))
    return results


async def last_audits(
    registry: StoreRegistry, stores: Counter[str], timeout: float
) -> tuple[list[AuditState], list[Examination]]:
    """Return the time of the last audit of each store, and results for stores that this process cannot list."""

    async def one(url: str) -> AuditState | Examination:
        try:
            async with asyncio.timeout(timeout):
                return AuditState(url, await last_saved(registry.get(url)))
        except TimeoutError:
            reason = f"it did not answer within {timeout:g} s"
        except (CorantoError, OSError) as error:
            reason = str(error)
        advice = "give this process the store's credentials, or for file:/// stores $CORANTO_FILE_ROOT"
        return absent(f"audits in {url}", f"unknown: {reason}", advice)

    found = await asyncio.gather(*(one(url) for url, _ in stores.most_common(MAX_STORES)))
    audits = [each for each in found if isinstance(each, AuditState)]
    return audits, [each for each in found if isinstance(each, Examination)]
