"""Names of publications, and keys of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_coranto.rows import key_function, writer_id_of
from coranto.errors import InvalidInput

PLAIN = st.text("ab._-", min_size=1, max_size=3)
RUN = st.text("a/:+", min_size=1, max_size=4)
PARTS = st.tuples(PLAIN, PLAIN, RUN, PLAIN, st.integers(-1, 12), st.text("a1", max_size=2))


@given(PARTS, PARTS)
def test_different_task_instances_have_different_names(
    one: tuple[str, str, str, str, int, str], other: tuple[str, str, str, str, int, str]
) -> None:
    assert (writer_id_of(*one) == writer_id_of(*other)) == (one == other)


def test_an_unmapped_task_has_no_index() -> None:
    assert writer_id_of("airflow", "d", "r", "t", -1, "") == writer_id_of("airflow", "d", "r", "t", None, "")
    assert writer_id_of("airflow", "d", "r", "t", 3, "v2") == "airflow/d/r/t/3/v2"


@pytest.mark.parametrize(("namespace", "edition"), [("a/b", ""), ("a", "b/c"), ("a", "b c")])
def test_ambiguous_parts_are_refused(namespace: str, edition: str) -> None:
    with pytest.raises(InvalidInput, match="characters other than"):
        writer_id_of(namespace, "d", "r", "t", 0, edition)


def test_the_key_is_a_column_or_a_function() -> None:
    assert key_function("tailnum")({"tailnum": "N1"}) == b"N1"
    assert key_function("number")({"number": 7}) == b"7"
    assert key_function(lambda row: row["a"] + "!")({"a": "x"}) == b"x!"
    assert key_function(lambda row: b"raw")({}) == b"raw"
    with pytest.raises(InvalidInput, match="no column 'tailnum'; it has carrier"):
        key_function("tailnum")({"carrier": "UA"})
