"""Ownership of a store's files: the rule for any names, postfixes and markers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coranto.fragments.fragment import Codec, Fragment
from coranto.fragments.journal_folders import MARKER, StoredFile, assign_files, owner_of
from coranto.names import names_above, nests

PARTS = st.sampled_from(["b", "b-c", "b.c", "date=1", "eu"])
PATHS = st.tuples(st.sampled_from(["shop", "shop-b"]), st.lists(PARTS, max_size=3)).map(
    lambda path: "/".join([path[0], *path[1]])
)
POSTFIXES = st.lists(PARTS, max_size=3).map("/".join)


def fragment(journal: str, postfix: str, number: int) -> Fragment:
    digest = number.to_bytes(20, "big")
    return Fragment(journal, number, number + 1, digest, Codec.NONE, path_postfix=postfix)


def below(journal: str, paths: list[str]) -> list[StoredFile]:
    folder = f"{journal}/"
    return [StoredFile(path.removeprefix(folder), 1) for path in paths if path.startswith(folder)]


def leads_into(journal: str, postfix: str, roots: set[str]) -> bool:
    """Return True if the path to the fragment leads through the folder of another journal in `roots`."""
    folder = f"{journal}/{postfix}"
    return any(root != journal and (f"{folder}/").startswith(f"{root}/") and len(root) > len(journal) for root in roots)


@given(
    st.lists(st.tuples(PATHS, POSTFIXES), max_size=12), st.sets(PATHS, max_size=4), st.sets(PATHS, max_size=3), PATHS
)
def test_every_fragment_belongs_to_at_most_one_journal(
    stored: list[tuple[str, str]], existing: set[str], marked: set[str], unknown_journal: str
) -> None:
    """A fragment written by the rule is listed by its journal, and by no other known journal."""
    known = existing | marked
    written = [
        fragment(journal, postfix, number)
        for number, (journal, postfix) in enumerate(stored)
        if journal in known and not leads_into(journal, postfix, known)
    ]
    paths = [each.content_path for each in written] + [f"{each}/{MARKER}" for each in marked]
    for journal in known:
        found = assign_files(journal, below(journal, paths), existing, backing_store="s3://b/")
        assert [each.content_path for each in found.fragments] == [
            each.content_path for each in written if each.journal == journal
        ]
        assert not found.unreadable
        # Each file of a folder belongs to the journal, or to another journal that is reported.
        for folder in found.others:
            assert f"{journal}/{folder}" in known
        assert all(f"{journal}/{folder}".rstrip("/") not in marked for folder in found.unmarked)
    # An unknown journal's folder has all files that are not in the folder of a known one.
    if unknown_journal not in known:
        own = {
            each.content_path
            for each in assign_files(unknown_journal, below(unknown_journal, paths), existing).fragments
        }
        for each in written:
            if each.content_path.startswith(f"{unknown_journal}/"):
                between = {root for root in known if root.startswith(f"{unknown_journal}/")}
                folder = each.content_path.rpartition("/")[0]
                hidden = any(folder == root or folder.startswith(f"{root}/") for root in between)
                assert (each.content_path in own) is not hidden


@given(PATHS, POSTFIXES, st.sets(PATHS, max_size=4))
def test_a_journal_without_nested_ones_keeps_any_postfix(journal: str, postfix: str, others: set[str]) -> None:
    others = {each for each in others if not each.startswith(f"{journal}/")}
    mine = fragment(journal, postfix, 1)
    found = assign_files(journal, below(journal, [mine.content_path]), others | {journal})
    assert [each.content_path for each in found.fragments] == [mine.content_path]
    assert (found.others, found.unmarked) == (frozenset(), {""})


def test_names_that_share_only_a_prefix_do_not_nest() -> None:
    files = [
        StoredFile(fragment("j", postfix, n).content_path.removeprefix("j/"), 1)
        for n, postfix in enumerate(("eu", "eu-1"))
    ]
    found = assign_files("shop", files, ["shop/eu-1", "shop-2", "shop", "shop/e"])
    assert [each.path_postfix for each in found.fragments] == ["eu"]
    assert (found.others, found.unmarked) == ({"eu-1"}, {"eu-1", ""})


def test_unreadable_files_of_other_journals_are_not_reported() -> None:
    files = [StoredFile(path, 1) for path in ("odd.txt", "eu/odd.txt", "eu/deep/.partial-1", MARKER, f"eu/{MARKER}")]
    found = assign_files("shop", files, [])
    assert [path for path, _ in found.unreadable] == ["odd.txt"]
    assert (found.fragments, found.others, found.unmarked) == ((), {"eu"}, frozenset())


@given(PATHS, st.sets(PATHS, max_size=5))
def test_the_longest_root_owns_a_folder(folder: str, roots: set[str]) -> None:
    around = [root for root in roots if root == folder or folder.startswith(f"{root}/")]
    assert owner_of(folder, roots) == max(around, key=len, default=None)


@given(PATHS, PATHS)
def test_names_above_are_the_proper_path_prefixes(one: str, other: str) -> None:
    assert (other in names_above(one)) == one.startswith(f"{other}/")
    assert nests(one, other) == nests(other, one) == (other in names_above(one) or one in names_above(other))
