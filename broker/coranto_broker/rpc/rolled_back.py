"""Errors of appends that were certainly rolled back, so that their clients may try again."""

from __future__ import annotations

from coranto.errors import CorantoError


class RolledBack(CorantoError):
    """An append was certainly rolled back, and its client may try again."""

    retriable = True


class DiskFull(RolledBack):
    """A broker's disk had no room for an append, which was rolled back."""


class TooManyAppends(RolledBack):
    """An append was refused because too many are under way."""

    def __init__(self, under_way: int) -> None:
        super().__init__(
            f"this broker has {under_way} appends under way and takes no more for now; nothing of this one was "
            "applied. Slow down, and try again later."
        )


class AppendUnderflow(RolledBack):
    """A client sent too slowly, and its append was rolled back."""

    def __init__(self, min_rate: int) -> None:
        super().__init__(
            f"the client did not sustain the minimum append rate of {min_rate} bytes per second, so the append was "
            "rolled back. Gather the content first, then append it in one go. If you did that, the brokers that "
            "it passed through are overloaded: slow down, and try again later."
        )
