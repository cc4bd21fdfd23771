"""Publishing of a step's output: its records become visible atomically, and once despite retries.

An attempt publishes the records in an open transaction. Then it inserts a row into the SQL store (`OutputLog.commit`).
Only the attempt that inserts the row appends its acknowledgements. A later attempt finds the row, and appends the same
acknowledgements again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from coranto.client import SyncJournalClient
from coranto.client.publishing import sync_publisher
from coranto.errors import InvalidInput, Unavailable
from coranto.messages.framing import JsonLines, JsonObject
from coranto.messages.mapping import RendezvousMapping
from coranto.messages.publisher import SyncPublisher
from coranto_consumers.outputs.log import CommittedOutput, OutputLog


def publish_output(
    client: SyncJournalClient,
    log: OutputLog,
    records: Iterable[Mapping[str, Any]],
    journals: Sequence[str],
    *,
    output: str,
    asset: str,
    began: float,
    key: str | None = None,
) -> CommittedOutput:
    """Publish records as JSON messages to journals, unless an attempt has already committed this `output`.

    Records with equal values of the field `key` go to one journal, in order; without it, all go to one. `records` are
    read only if the output is not committed yet. `began` is the earliest begin of the first attempt, in Unix seconds.

    Raises InvalidInput for a record without the field, and if outputs of that time may have been deleted from the log:
    then it is unknown if this output was published. Raises SqlStoreError, Unavailable and the errors of appends; retry
    after these.
    """
    done = log.find(output)
    if done is None:
        if log.may_be_forgotten(began):
            raise InvalidInput(
                f"output {output} is of a run that began {datetime.fromtimestamp(began, UTC):%Y-%m-%d}, and outputs of "
                "that time are forgotten; whether this one was published is unknown. Launch a new run, which "
                "publishes the output again, and keep outputs for more days if runs take so long",
                field="began",
            )
        publisher = sync_publisher(client, JsonLines())
        made = _prepared(publisher, records, _mapped(journals, output, key))
        done = made if log.commit(output, asset, made) else _committed_by_another(log, publisher, output)
    # Appending acknowledgements twice is harmless: readers ignore duplicates.
    for journal, intent in done.intents.items():
        client.append(journal, intent, retry_unknown=True)
    log.acknowledge(output)
    return done


def _mapped(journals: Sequence[str], output: str, key: str | None) -> Callable[[Mapping[str, Any]], str]:
    """Return the mapping of an output's records to journals."""
    mapping = RendezvousMapping(journals)
    only = mapping(output.encode())
    return lambda record: only if key is None else mapping(str(record[key]).encode())


def _prepared(
    publisher: SyncPublisher[JsonObject],
    records: Iterable[Mapping[str, Any]],
    journal_of: Callable[[Mapping[str, Any]], str],
) -> CommittedOutput:
    """Publish records as pending messages. Roll them back after an error."""
    count = 0
    try:
        for record in records:
            try:
                journal = journal_of(record)
            except KeyError as error:
                missing = f"record {count} has no field {error}, which chooses its journal"
                raise InvalidInput(missing, field=str(error.args[0])) from error
            publisher.add(journal, {**record})
            count += 1
        return CommittedOutput(count, publisher.prepare())
    except BaseException:
        publisher.rollback()
        raise


def _committed_by_another(log: OutputLog, publisher: SyncPublisher[JsonObject], output: str) -> CommittedOutput:
    """Roll back pending messages, and return another attempt's commit. Raises Unavailable if it is gone."""
    publisher.rollback()
    quicker = log.find(output)
    if quicker is None:
        raise Unavailable(f"output {output} was committed by another attempt, and is gone from the store")
    return quicker
