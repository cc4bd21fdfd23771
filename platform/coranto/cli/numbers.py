"""Numbers in help texts, taken from the constants that they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def with_numbers(**values: object) -> Callable[[F], F]:
    """Return a decorator that puts values into the help of a command: its docstring names them as `{name}`."""

    def fill(command: F) -> F:
        if command.__doc__ is not None:  # Python leaves docstrings out with -OO.
            command.__doc__ = command.__doc__.format(**values)
        return command

    return fill
