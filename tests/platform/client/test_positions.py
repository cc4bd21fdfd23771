"""Positions of journals: their growth, and the digests of their offsets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coranto.client.positions import JournalPosition, grown_bytes, heads_of, vector_digest

positions = st.dictionaries(
    st.sampled_from(["a/one", "a/two", "a/three"]),
    st.builds(JournalPosition, st.integers(0, 100), st.integers(1, 3)),
)


def test_a_recreated_journal_has_grown_from_zero() -> None:
    before = {"a/one": JournalPosition(70, 1), "a/two": JournalPosition(5, 2)}
    now = {"a/one": JournalPosition(30, 9), "a/two": JournalPosition(9, 2), "a/new": JournalPosition(1, 10)}
    assert grown_bytes(now, before) == 30 + 4 + 1
    assert heads_of(now) == {"a/one": 30, "a/two": 9, "a/new": 1}


@given(positions, positions)
def test_growth_is_never_negative_and_zero_from_a_position_to_itself(
    now: dict[str, JournalPosition], before: dict[str, JournalPosition]
) -> None:
    assert 0 <= grown_bytes(now, before) <= sum(heads_of(now).values())
    assert grown_bytes(now, now) == 0


@given(positions, positions)
def test_digests_are_equal_only_for_equal_offsets(
    one: dict[str, JournalPosition], other: dict[str, JournalPosition]
) -> None:
    turned = dict(reversed(heads_of(one).items()))
    assert vector_digest(turned) == vector_digest(heads_of(one))
    assert (vector_digest(heads_of(one)) == vector_digest(heads_of(other))) is (heads_of(one) == heads_of(other))
