"""The end of a transaction: staged rows are merged with the checkpoint, and published messages are acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import structlog
from sqlalchemy.exc import SQLAlchemyError

from coranto.client import SyncJournalClient
from coranto.errors import CorantoError, JournalNotFound
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.spark.outputs import Published, Staged
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.staging import delete_staged, delete_stale

_PATIENCE_AFTER_FAILURE: Final = 5.0
"""The time in seconds for each further acknowledgement, once one has failed."""
_ROLLBACK_PATIENCE: Final = 1.0
"""The time in seconds for each rollback: it spares readers memory, and nothing depends on it."""

_log = structlog.get_logger(__name__)


def commit_outputs(
    store: SqlStore,
    name: str,
    fence: int,
    staged: Sequence[Staged],
    checkpoint: Checkpoint,
    merged: Callable[[], None] = lambda: None,
) -> None:
    """Merge staged rows, and commit them with the checkpoint of the consumer `name`. `merged` is called in between.

    Raises Fenced, InvalidInput for rows that do not fit, SqlStoreError and CommitOutcomeUnknown.
    """
    with store.transaction(name, fence) as transaction:
        for each in staged:
            each.merge(transaction.connection)
        for stage in {each.stage.name: each.stage for each in staged}.values():
            delete_staged(transaction.connection, stage, name, below_fence=fence + 1)
        merged()
        transaction.commit(checkpoint)


class Acknowledged(NamedTuple):
    """The outcome of appending acknowledgements."""

    journals: int
    may_repeat: bool
    """True if one of them may appear in its journal again, however late."""


def acknowledge(client: SyncJournalClient, intents: Mapping[str, bytes]) -> Acknowledged:
    """Append acknowledgements to their journals.

    Each one is tried: a failure of one journal does not keep the others from theirs. Then the client's first error is
    raised. Acknowledgements are in the committed checkpoint, so the next start appends them again.
    """
    appended, may_repeat = 0, False
    failure: CorantoError | None = None
    for journal, content in sorted(intents.items()):
        # Brokers that are away for long may be away for all journals.
        patience = None if failure is None else min(_PATIENCE_AFTER_FAILURE, client.config.patience)
        try:
            may_repeat |= client.append(journal, content, retry_unknown=True, patience=patience).may_repeat
        except JournalNotFound:
            _log.warning("source.pending_messages_gone", journal=journal)
        except CorantoError as error:
            _log.warning("acknowledgement.failed", journal=journal, error=str(error))
            failure = failure or error
        else:
            appended += 1
    if failure is not None:
        raise failure
    return Acknowledged(appended, may_repeat)


@contextmanager
def rolled_back_on_failure(client: SyncJournalClient, published: Published) -> Iterator[Callable[[], None]]:
    """Tell readers to drop published messages if the block fails before it calls the given function.

    It must be called before the commit begins: from then on, nobody here knows if the messages are committed. Readers
    would otherwise remember the producers of the messages until retention removes these.
    """
    is_begun = []
    try:
        yield lambda: is_begun.append(True)
    except CorantoError as error:
        if not is_begun:
            _roll_back(client, published.rollbacks, error)
        raise


def _roll_back(client: SyncJournalClient, rollbacks: Mapping[str, bytes], error: CorantoError) -> None:
    for journal, content in sorted(rollbacks.items()):
        try:
            client.append(journal, content, retry_unknown=True, patience=_ROLLBACK_PATIENCE)
        except CorantoError as failure:
            error.add_note(f"{failure}: readers keep the failed transaction's messages aside")
            return


def delete_stale_rows(store: SqlStore, name: str, fence: int) -> None:
    """Delete rows that dead or fenced instances of the consumer `name` have staged. Raises SqlStoreError."""
    try:
        with store.engine.begin() as connection:
            delete_stale(store, connection, name, fence)
    except SQLAlchemyError as error:
        raise store.failure("stale staged rows could not be deleted", error) from error
