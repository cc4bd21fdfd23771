"""An ingest for blocking code, such as a Dagster step or an Airflow task."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Final

from coranto.client import ClientConfig, JournalClient
from coranto.client.loop import shared_loop
from coranto.ingest.opening import open_ingest
from coranto.ingest.runs import IngestReport, RunningIngest
from coranto.ingest.spec import IngestSpec

_POLL_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 60.0
"""The longest time for an interrupted ingest to commit the rows that it has read."""


def run_ingest(
    config: ClientConfig,
    spec: IngestSpec,
    *,
    follow: bool = False,
    accept_loss: bool = False,
    on_progress: Callable[[IngestReport], object] = lambda report: None,
    stop: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Run an ingest on the loop of this process, and return its report, like `Ingest.run`.

    `on_progress` and `stop` are called in this thread, twice a second. If `stop` returns True, or this thread is
    interrupted, the ingest commits the rows that it has read, and ends. Raises the errors of `Ingest.run`, MissingExtra
    if a library of the source is missing, and the errors of `on_progress` and `stop`.
    """
    loop = shared_loop()
    ingest = open_ingest(JournalClient.of(config), spec, accept_loss=accept_loss)
    running = loop.submit(_closing(ingest, follow=follow))
    try:
        while not concurrent.futures.wait([running], _POLL_SECONDS).done:
            on_progress(ingest.report)
            if stop():
                loop.call(ingest.stop)
        return running.result()
    except BaseException:
        loop.call(ingest.stop)
        concurrent.futures.wait([running], _STOP_SECONDS)
        running.cancel()
        raise


async def _closing(ingest: RunningIngest, *, follow: bool) -> IngestReport:
    async with ingest.client:
        return await ingest.run(follow=follow)
