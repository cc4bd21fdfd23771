"""Whose is a file of a fragment store? The one rule that tells journals of nested names apart. Pure.

A fragment lies at `<journal>/[<postfix>/]<content name>`, and a postfix may be any path. So a file below
`shop/events/eu/` may be of the journal `shop/events/eu`, or of `shop/events` with the postfix `eu`. Templates of
postfixes change over time and nobody remembers the earlier ones; a journal that did not count what it stored under an
earlier template would give its offsets a second time. Hence a journal's listing takes every file below its folder,
whatever the subfolder, but for the subfolders that are known to be another journal's:

* A journal of that name exists. The longest name that leads to a file owns it.
* The subfolder has a *marker*: a file named `.coranto-journal`, which brokers leave in the folder of each journal that
  they store content of. It outlives the journal, and tells other clusters that share the store.

What brokers write keeps to the same rule: a postfix that leads into a folder of another journal is not used
(`owner_of`), and brokers refuse to create a journal whose name nests with another's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment, parse_content_path

MARKER: Final = ".coranto-journal"
"""Name of the file that marks a folder as a journal's."""
MARKER_TEXT: Final = (
    b"This folder holds fragments of the Coranto journal that its path names. Keep this file for as long as there are\n"
    b"fragments: it keeps them from being taken for those of a journal of a shorter name.\n"
)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file below a journal's folder: its path from there, when the store received it (Unix seconds), its bytes."""

    path: str
    mod_time: int
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a store holds below a journal's folder.

    `fragments` are the journal's own. `others` are the folders below it, relative to it, that are other journals', as
    far as there are files in them; `unmarked` those of them that have no marker, and the empty path when the journal's
    own folder has none although there are fragments of it. `unreadable` are files that are named like none of this,
    with the reason.
    """

    fragments: tuple[Fragment, ...]
    others: frozenset[str]
    unmarked: frozenset[str]
    unreadable: tuple[tuple[str, str], ...] = ()


def owner_of(folder: str, roots: Collection[str]) -> str | None:
    """The longest of `roots` that `folder` is, or lies below. All are relative paths. None when there is none."""
    while folder:
        if folder in roots:
            return folder
        folder = folder.rpartition("/")[0]
    return None


def sort_out(journal: str, files: Iterable[StoredFile], names: Iterable[str], *, backing_store: str = "") -> Listing:
    """Tell a journal's own fragments from all files below its folder. `names` are those of journals that exist."""
    found = list(files)
    folder = f"{journal}/"
    marked = {each.path.rpartition("/")[0] for each in found if each.path.rpartition("/")[2] == MARKER}
    roots = {name.removeprefix(folder) for name in names if name.startswith(folder)} | (marked - {""})
    fragments: list[Fragment] = []
    others: set[str] = set()
    unreadable: list[tuple[str, str]] = []
    for each in found:
        parent, _, name = each.path.rpartition("/")
        owner = owner_of(parent, roots) if roots else None
        if owner is not None:
            others.add(owner)
        elif name != MARKER:
            try:
                fragments.append(
                    parse_content_path(
                        journal,
                        each.path,
                        backing_store=backing_store,
                        mod_time=each.mod_time,
                        file_bytes=each.size,
                    )
                )
            except InvalidInput as error:
                unreadable.append((each.path, str(error)))
    unmarked = (others | ({""} if fragments else set())) - marked
    return Listing(tuple(fragments), frozenset(others), frozenset(unmarked), tuple(unreadable))


Names = Callable[[], Iterable[str]]
"""Names of journals that exist, as of the moment when it is called."""


def no_names() -> Iterable[str]:
    """For those who know of no journals. Markers alone tell them what is not a journal's own."""
    return ()
