"""The end of a transaction: acknowledge published messages, or roll them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import structlog

from coranto.client import SyncJournalClient
from coranto.errors import CorantoError, JournalNotFound, PermissionDenied
from coranto.security.tokens import shows
from coranto_consumers.spark.outputs.staging import Published

_TIMEOUT_AFTER_FAILURE: Final = 5.0
"""The retry timeout in seconds of each further acknowledgement, once one has failed."""
_ROLLBACK_TIMEOUT: Final = 1.0
"""The retry timeout in seconds of each rollback: it saves readers memory, and nothing depends on it."""

_log = structlog.get_logger(__name__)


class Acknowledged(NamedTuple):
    """The outcome of appending acknowledgements."""

    journals: int
    may_repeat: bool
    """True if one of them may appear in its journal again, any time later."""


def acknowledge(client: SyncJournalClient, intents: Mapping[str, bytes]) -> Acknowledged:
    """Append acknowledgements to their journals.

    Tries all journals, then raises the client's first error. The committed checkpoint has the acknowledgements, so the
    next start appends them again.
    """
    appended, may_repeat = 0, False
    failure: CorantoError | None = None
    for journal, content in sorted(intents.items()):
        # If brokers are away for long, all journals may fail: do not wait for the full timeout each time.
        retry_timeout = None if failure is None else min(_TIMEOUT_AFTER_FAILURE, client.config.retry_timeout)
        try:
            may_repeat |= client.append(journal, content, retry_unknown=True, retry_timeout=retry_timeout).may_repeat
        except JournalNotFound as error:
            if shows(client.config.auth, journal):
                _log.warning("source.pending_messages_gone", journal=journal)
            else:
                failure = failure or PermissionDenied(f"{error} Or the token does not cover it: use one that does.")
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
    """Tell readers to drop published messages if the block fails before it calls the yielded function.

    Call that function before the commit begins: from then on, the outcome may be unknown. Without a rollback, readers
    remember the producers of the messages until retention removes the messages.
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
            client.append(journal, content, retry_unknown=True, retry_timeout=_ROLLBACK_TIMEOUT)
        except CorantoError as failure:
            error.add_note(f"{failure}: readers keep the failed transaction's messages aside")
            return
