"""The base of sets of metadata in one namespace, with names as in Dagster's UI and other libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Self

import dagster as dg
from pydantic import BaseModel, ConfigDict

NAMESPACE: Final = "dagster-coranto"
"""The first part of the names of all metadata of this library."""


class MetadataSet(BaseModel):
    """Metadata with names such as `dagster-coranto/messages`. `dict(…)` and `**` give the values that are not None."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    namespace: ClassVar[str] = NAMESPACE

    def keys(self) -> list[str]:
        """Return the names of values that are not None."""
        return [name for name, _ in self]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name.removeprefix(f"{self.namespace}/"))

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]  # as pydantic has it, with other names
        for name in type(self).model_fields:
            if (value := getattr(self, name)) is not None:
                yield f"{self.namespace}/{name}", value

    @classmethod
    def extract(cls, metadata: Mapping[str, Any]) -> Self:
        """Extract the set from metadata. Values of plain fields are unwrapped from Dagster's metadata values."""
        found = {}
        for name, field in cls.model_fields.items():
            value = metadata.get(f"{cls.namespace}/{name}")
            wrapped = isinstance(value, dg.MetadataValue) and "MetadataValue" not in str(field.annotation)
            found[name] = value.value if wrapped and value is not None else value
        return cls(**found)


class TableMetadata(MetadataSet):
    """Metadata of tables, by Dagster's own names."""

    namespace = "dagster"

    table_name: str | None = None
    row_count: int | None = None
    column_schema: dg.TableSchema | None = None
