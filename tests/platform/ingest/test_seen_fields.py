"""Fields of several schemas: each schema is inspected once, and the same tuple is returned until there are more."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.seen_fields import SeenFields
from coranto.types.kinds import TypeField, format_fields
from coranto.types.parsing import parse_fields


def test_fields_of_several_schemas() -> None:
    parsed: list[str] = []

    def fields_of(text: str) -> tuple[TypeField, ...]:
        parsed.append(text)
        return parse_fields(text)

    seen = SeenFields()
    first = seen.of(["a INT NOT NULL"], fields_of)
    assert format_fields(first) == "a INT NOT NULL"
    second = seen.of(["a INT NOT NULL", "b DATE, a BIGINT NOT NULL"], fields_of)
    assert format_fields(second) == "a BIGINT NOT NULL, b DATE"
    assert seen.of(["a INT NOT NULL"], fields_of) is second
    assert len(parsed) == 2
    with pytest.raises(InvalidInput, match="<a TEXT> cannot be registered: a is BIGINT, and STRING"):
        seen.of(["a STRING"], fields_of, lambda _: "<a TEXT>")
    assert seen.of([], fields_of) is second
