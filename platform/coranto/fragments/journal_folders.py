"""The ownership of files in a fragment store, where journals may have nested names. Pure.

A fragment is at `<journal>/[<postfix>/]<content name>`, and a postfix may be any path. So a file below
`shop/events/eu/` may belong to the journal `shop/events/eu`, or to `shop/events` with the postfix `eu`. Postfix
templates change over time, and the earlier ones are not recorded. A journal that missed fragments stored under an
earlier template would assign their offsets a second time. So a journal's listing has every file below its folder,
except in subfolders that are known to belong to another journal:

* A journal with the subfolder's name exists. A file belongs to the longest name that is above it.
* The subfolder has a *marker*: a file named `.coranto-journal`. Brokers write one to the folder of each journal whose
  content they store. The marker outlives the journal, and other clusters that share the store see it.

Brokers follow the same rule when they write. They do not use a postfix that leads into a folder of another journal
(`owner_of`), and they refuse to create a journal whose name nests with another's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment, parse_content_path

MARKER: Final = ".coranto-journal"
"""The name of the file that marks a folder as a journal's."""
MARKER_TEXT: Final = (
    b"This folder holds fragments of the Coranto journal that its path names. Keep this file for as long as there are\n"
    b"fragments: without it, they could be taken for fragments of a journal of a shorter name.\n"
)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file below a journal's folder: its relative path, when the store received it (Unix seconds), and its bytes."""

    path: str
    mod_time: int
    size: int | None = None


@dataclass(frozen=True, slots=True)
class FolderListing:
    """The content of a store below a journal's folder.

    `fragments` are the journal's own. `others` are the folders of other journals below it that have files, as relative
    paths. `unmarked` are the folders without a marker: the `others`, and the journal's own (an empty path) if it has
    fragments. `unreadable` are the files without a fragment's name, each with the reason.
    """

    fragments: tuple[Fragment, ...]
    others: frozenset[str]
    unmarked: frozenset[str]
    unreadable: tuple[tuple[str, str], ...] = ()


def owner_of(folder: str, roots: Collection[str]) -> str | None:
    """Return the longest of `roots` that is `folder` or above it, or None. All are relative paths."""
    while folder:
        if folder in roots:
            return folder
        folder = folder.rpartition("/")[0]
    return None


def assign_files(
    journal: str, files: Iterable[StoredFile], names: Iterable[str], *, backing_store: str = ""
) -> FolderListing:
    """Select a journal's own fragments among all files below its folder. `names` are the names of existing journals."""
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
    return FolderListing(tuple(fragments), frozenset(others), frozenset(unmarked), tuple(unreadable))


Names = Callable[[], Iterable[str]]
"""Returns the names of the journals that exist at the time of the call."""


def no_names() -> Iterable[str]:
    """Return no names, for callers that know no journals. Then only markers identify the files of other journals."""
    return ()
