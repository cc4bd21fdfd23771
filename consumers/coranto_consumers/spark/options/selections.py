"""Options that select the journals of a read or a write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from coranto.client import JournalInfo, SyncJournalClient
from coranto.errors import InvalidInput
from coranto.labels import format_selector, label_selector
from coranto.names import validate_journal
from coranto_consumers.journals.discovery import JournalLabels, checked, list_journals

OPTIONS: Final = {
    "assign": 'journals, as a JSON list: ["flights/events/part-000"]',
    "journal": "one journal: flights/events/part-000",
    "prefix": "prefix of the names of journals: flights/events/",
    "subscribe": "journals, separated by commas",
    "subscribePattern": "regular expression for whole names of journals: flights/.*",
    "selector": "label selector of journals: name:prefix=flights/events/",
    "stream": "name of a stream; all its segments are read, also after splits: shop/orders",
}
"""Exactly one of these options must be given."""


@dataclass(frozen=True, slots=True)
class SelectedJournals:
    """The selected journals: an explicit list, or matches of a pattern for whole names or of a label selector."""

    journals: tuple[str, ...] | None = None
    pattern: str | None = None
    selector: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Parse options, whose names are in lower case. Raises InvalidInput unless exactly one is given."""
        names = [name for name in OPTIONS if name.lower() in given]
        if len(names) != 1:
            raise InvalidInput(
                f"exactly one of {', '.join(OPTIONS)} must be given, not {', '.join(names) or 'none'}", field="options"
            )
        return cls(_journals(given), _pattern(given), _selector(given))

    def list(self, client: SyncJournalClient, labels: JournalLabels) -> tuple[JournalInfo, ...]:
        """Return the journals, sorted by name. Raises InvalidInput as `list_journals` does."""
        if self.pattern is None:
            wanted = (self.selector or "") if self.journals is None else self.journals
            return list_journals(client, wanted, field="options", labels=labels)
        field = "option subscribePattern"
        found = [info for info in client.list("").journals if re.fullmatch(self.pattern, info.name)]
        if not found:
            raise InvalidInput(f"no journal has a name like {self.pattern!r}; see `coranto journals list`", field=field)
        return checked(found, field, labels)


def _journals(given: Mapping[str, str]) -> tuple[str, ...] | None:
    if "assign" in given:
        try:
            names = json.loads(given["assign"])
        except ValueError as error:
            raise InvalidInput(f"not JSON: {error}", field="option assign") from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidInput('not a JSON list of journal names, such as ["a/one", "a/two"]', field="option assign")
    elif "journal" in given:
        names = [validate_journal(given["journal"], kind="option journal")]
    elif "subscribe" in given:
        names = [name.strip() for name in given["subscribe"].split(",")]
    else:
        return None
    if not names or not all(names):
        raise InvalidInput("names no journal; give at least one", field="options")
    return tuple(dict.fromkeys(names))


def _pattern(given: Mapping[str, str]) -> str | None:
    if "subscribepattern" not in given:
        return None
    text = given["subscribepattern"]
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidInput(f"{text!r} is not a regular expression: {error}", field="option subscribePattern") from error
    if not text:
        raise InvalidInput("matches no journal; to match all, write .*", field="option subscribePattern")
    return text


def _selector(given: Mapping[str, str]) -> str | None:
    if "stream" in given:
        return stream_selector(given["stream"], field="option stream")
    if "prefix" not in given:
        return given.get("selector")
    if not given["prefix"]:
        raise InvalidInput("is empty; to match all journals, set subscribePattern to .*", field="option prefix")
    try:
        return format_selector(label_selector(include=[("name:prefix", given["prefix"])]))
    except InvalidInput as error:
        raise InvalidInput(error.message, field="option prefix") from error


def stream_selector(stream: str, *, field: str = "stream") -> str:
    """Return the label selector of a stream's segments, as for `SparkApplication.sources`. Raises InvalidInput."""
    from coranto.streams.model.stream import segments_selector  # Workers do not need it.

    try:
        validate_journal(stream)
    except InvalidInput as error:
        raise InvalidInput(error.message, field=field) from error
    return format_selector(segments_selector(stream))
