"""Numbers in help texts, taken from the constants that they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def with_numbers(**values: object) -> Callable[[F], F]:
    """Return a decorator that replaces `{name}` by values in the docstring of a command, which is its help."""

    def fill(command: F) -> F:
        if command.__doc__ is not None:  # Python leaves docstrings out with -OO.
            command.__doc__ = command.__doc__.format(**values)
        return command

    return fill
