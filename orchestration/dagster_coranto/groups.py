"""Groups of journals: what one asset stands for."""

from __future__ import annotations

from dataclasses import dataclass

from coranto.errors import InvalidInput
from coranto.labels import NAME, format_selector, label_selector
from coranto.names import validate_journal
from coranto.wire import protocol_pb2 as pb


@dataclass(frozen=True, slots=True)
class JournalGroup:
    """The journals below one name: group `flights/events` is every journal `flights/events/…`.

    Raises InvalidInput when no journal could be in it.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name.endswith("/"):
            raise InvalidInput(f"{self.name!r} ends with a slash; name the group without it", field="group")
        validate_journal(f"{self.name}/any")

    @property
    def selector(self) -> pb.LabelSelector:
        """Matches the group's journals, and no others."""
        return label_selector(include={f"{NAME}:prefix": f"{self.name}/"})

    @property
    def selector_text(self) -> str:
        """The selector as text."""
        return format_selector(self.selector)

    def under(self, prefix: str) -> JournalGroup:
        """The group of the same journals below a prefix, such as `rerun/`. An empty prefix changes nothing."""
        return JournalGroup(check_prefix(prefix) + self.name)


def check_prefix(prefix: str) -> str:
    """`prefix`, when it may be put in front of journal names: empty, or ending with a slash. Raises InvalidInput."""
    if prefix and not prefix.endswith("/"):
        raise InvalidInput(f"{prefix!r} must end with a slash, such as {prefix + '/'!r}", field="prefix")
    return prefix
