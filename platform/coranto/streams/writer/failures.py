"""The errors of units when an append or the writer failed. Pure."""

from __future__ import annotations

from coranto.errors import CommitUnknown, CorantoError, EarlierWriteFailed, Outcome, WriteError, WriterExpired
from coranto.streams.writer.gaps import Gap


def failure_of(error: CorantoError, *, doubtful: bool, first: bool) -> CorantoError:
    """Return the error of one unit after `error` ended the writer's work in a segment.

    `doubtful` means that the unit may have been applied, and `first` that the unit caused the error. Units after a
    failed unit are not applied, because they would precede its retry.
    """
    unknown = error.outcome is Outcome.UNKNOWN
    of_the_writer = isinstance(error, WriteError) and not isinstance(error, CommitUnknown)
    if doubtful:
        if isinstance(error, CommitUnknown):
            return error
        if isinstance(error, WriterExpired):
            return _because(WriterExpired(str(error), Outcome.UNKNOWN), error)
        return _because(CommitUnknown(f"{error}. An attempt at it may have been applied"), error)
    if (of_the_writer or first) and not unknown:
        return error
    return _because(EarlierWriteFailed(f"not appended, as an earlier write failed: {error}"), error)


def failure_after(gap: Gap) -> EarlierWriteFailed:
    """Return the error of a unit above a gap."""
    error = EarlierWriteFailed(
        f"not appended, as sequence {gap.sequence} failed ({gap.error}) and would count as durable. Write sequence "
        f"{gap.sequence} again, and then everything that failed after it"
    )
    error.__cause__ = gap.error
    return error


def _because(error: WriteError, cause: CorantoError) -> WriteError:
    error.__cause__ = cause
    return error
