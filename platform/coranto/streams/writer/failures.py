"""What a unit is failed with, when an append or the writer failed: pure."""

from __future__ import annotations

from coranto.errors import CommitUnknown, CorantoError, EarlierWriteFailed, Outcome, WriteError, WriterExpired


def failure_of(error: CorantoError, *, doubtful: bool, first: bool) -> CorantoError:
    """The error of one unit, where `error` ended the writer's work in a segment.

    `doubtful` says that the unit may have been applied, `first` that it is the one that the error came of. What follows
    a unit that failed is not applied, since it would stand where the other should.
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
    return _because(EarlierWriteFailed(f"not appended, as what came before it failed: {error}"), error)


def _because(error: WriteError, cause: CorantoError) -> WriteError:
    error.__cause__ = cause
    return error
