"""Groups of journals. An asset of an orchestrator represents one group."""

from __future__ import annotations

from dataclasses import dataclass

from coranto.errors import InvalidInput
from coranto.labels import NAME, format_selector, label_selector
from coranto.names import check_prefix, validate_journal
from coranto.wire import protocol_pb2 as pb


@dataclass(frozen=True, slots=True)
class JournalGroup:
    """The journals below one name. The group `flights/events` is every journal `flights/events/…`.

    Raises InvalidInput for an invalid name.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name.endswith("/"):
            raise InvalidInput(f"{self.name!r} ends with a slash; name the group without it", field="group")
        validate_journal(f"{self.name}/any")

    @property
    def selector(self) -> pb.LabelSelector:
        """The selector that matches exactly the group's journals."""
        return label_selector(include={f"{NAME}:prefix": f"{self.name}/"})

    @property
    def selector_text(self) -> str:
        """The selector as text."""
        return format_selector(self.selector)

    def under(self, prefix: str) -> JournalGroup:
        """Return the group of the same journals below a prefix, such as `rerun/`. An empty prefix changes nothing."""
        return JournalGroup(check_prefix(prefix) + self.name)
