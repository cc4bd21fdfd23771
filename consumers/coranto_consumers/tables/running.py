"""Runs of tables, by the runner that the file names."""

from __future__ import annotations

import concurrent.futures
from typing import Final

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.loop import shared_loop
from coranto_consumers.tables.preparing import spark_runner
from coranto_consumers.tables.runs import RunOptions, TableReport
from coranto_consumers.tables.spec import TableSpec
from coranto_consumers.tables.type_watch import TypeWatch

_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 60.0
"""The time for a table to complete its transactions after an interruption."""
_DEFAULTS: Final = RunOptions()


def run_table(config: ClientConfig, spec: TableSpec, options: RunOptions = _DEFAULTS) -> TableReport:
    """Write a table until it is stopped, or with `RunOptions.once` until all present messages are in it.

    Processes that write the same table fence one another off: the last one continues. Raises

    * InvalidInput for a file that does not fit the journals, the type or the table,
    * Fenced when another process has started, and ConsumerChanged for other sources or another store than before,
    * CorruptMessage and RejectedRow for a message that does not become a row,
    * OffsetJump, StreamTruncated and CorruptData for content that is gone before it was read,
    * errors of the client and the store, if they do not pass: `once` after ten minutes.

    After any of them, the next run continues from the last commit.
    """
    with SyncJournalClient.of(config) as client, TypeWatch(client, spec) as watch:
        if spec.runner == "shard":
            return _runs_as_shard(client, spec, watch, options)
        report: TableReport = spark_runner().run_spark(client, spec, watch, options)
        return report


def _runs_as_shard(client: SyncJournalClient, spec: TableSpec, watch: TypeWatch, options: RunOptions) -> TableReport:
    from coranto_consumers.tables.shard_runner import ShardRunner

    runner = ShardRunner(client, spec, watch, options)
    running = shared_loop().submit(runner.run())
    try:
        while not concurrent.futures.wait([running], _POLL_SECONDS).done:
            options.on_progress(runner.report)
            if options.stop():
                runner.stop()
        running.result()
    except BaseException:
        runner.stop()
        concurrent.futures.wait([running], _STOP_SECONDS)
        running.cancel()
        raise
    return runner.report
