"""Selection of a command's journals, by name or by labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from coranto.client import JournalClient, JournalInfo, Listing, SyncJournalClient
from coranto.errors import InvalidInput, JournalNotFound
from coranto.labels import label_selector, parse_selector
from coranto.names import validate_journal
from coranto.wire import protocol_pb2 as pb

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[JOURNAL]...", help="Journals by name.", show_default=False)
]
Selector = Annotated[
    str | None,
    typer.Option(
        "--selector",
        "-l",
        help="Journals by labels, such as `name:prefix=flights/` or `content-type in (text/csv), !draft`. "
        "Empty: all. A journal's name alone means that journal.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Journals named in `names`, or all that match `selector`."""

    names: tuple[str, ...]
    selector: str

    @property
    def attempts(self) -> tuple[pb.LabelSelector, ...]:
        """Selectors to try in turn until one matches."""
        if self.names:
            return (label_selector(include=[("name", name) for name in self.names]),)
        parsed = parse_selector(self.selector)
        if "/" in self.selector and [label.name for label in parsed.include.labels] == [self.selector]:
            # As a selector, a path means a label of that name. Most users mean a journal of that name.
            return parsed, label_selector(include={"name": self.selector})
        return (parsed,)

    def checked(self, listing: Listing) -> tuple[JournalInfo, ...]:
        """Return the listed journals. Raises JournalNotFound if a named one is missing, or none matches."""
        missing = sorted(set(self.names) - set(listing.names))
        if missing:
            raise JournalNotFound(", ".join(missing))
        if not listing.journals:
            raise InvalidInput(
                f"no journal matches {self.selector!r}; `coranto journals list` shows all", field="--selector"
            )
        return listing.journals


def chosen(names: list[str] | None, selector: str | None) -> Selection:
    """Return the selection given on the command line. Raises typer.BadParameter unless names or a selector is given."""
    if bool(names) == (selector is not None):
        raise typer.BadParameter("name journals, or select some with --selector", param_hint="JOURNAL")
    for name in names or ():
        validate_journal(name)
    return Selection(tuple(dict.fromkeys(names or ())), selector or "")


async def select(client: JournalClient, selection: Selection) -> tuple[JournalInfo, ...]:
    """Return the selected journals in their current state. Raises JournalNotFound or InvalidInput if there are none."""
    for attempt in selection.attempts:
        listing = await client.list(attempt)
        if listing.journals:
            break
    return selection.checked(listing)


def select_now(client: SyncJournalClient, selection: Selection) -> tuple[JournalInfo, ...]:
    """Select journals as `select` does, for a blocking client."""
    for attempt in selection.attempts:
        listing = client.list(attempt)
        if listing.journals:
            break
    return selection.checked(listing)
