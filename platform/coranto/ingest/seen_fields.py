"""Fields for the rows of all schemas that a source has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from coranto.errors import InvalidInput
from coranto.types.kinds import TypeField
from coranto.types.merging import merged_fields

K = TypeVar("K")


class SeenFields:
    """Merged fields of schemas. Each schema is merged once."""

    def __init__(self) -> None:
        self._known: set[object] = set()
        self._merged: tuple[TypeField, ...] = ()

    def of(
        self, seen: Iterable[K], fields_of: Callable[[K], tuple[TypeField, ...]], name: Callable[[K], str] = str
    ) -> tuple[TypeField, ...]:
        """Return fields that hold the rows of these schemas and of earlier ones.

        The same tuple is returned until a schema adds to it. Raises InvalidInput, with the name of the schema.
        """
        for key in seen:
            if key in self._known:
                continue
            try:
                fields = fields_of(key)
                merged = merged_fields(self._merged, fields) if self._known else fields
            except InvalidInput as error:
                raise InvalidInput(
                    f"{name(key)} cannot be registered: {error.message}. Give it an ingest and a type of its own, or "
                    "leave `register` out"
                ) from error
            self._merged = self._merged if merged == self._merged else merged
            self._known.add(key)
        return self._merged
