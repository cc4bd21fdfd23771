"""Labels: set algebra, selectors, and their text."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import InvalidInput
from coranto.labels import label_selector, label_set, matches, parse_selector
from coranto.wire import protocol_pb2 as pb

NAMES = st.sampled_from(["aa", "bb", "cc", "prefix-of", "é漢", "in", "not", "notin", "x/y.z"])
VALUES = st.sampled_from(["", "1", "1/", "1/2", "2", "a=b", "=x", "==", "100%", "é", "in"])


@st.composite
def label_sets(draw: st.DrawFn) -> pb.LabelSet:
    pairs = draw(st.lists(st.tuples(NAMES, VALUES), max_size=6))
    return label_set(_without_mixed_empty(pairs))


def _without_mixed_empty(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Omit empty values next to other values of the same name."""
    filled = {name for name, value in pairs if value}
    return [(name, value) for name, value in pairs if value or name not in filled]


@st.composite
def selectors(draw: st.DrawFn) -> pb.LabelSelector:
    sides = []
    for _ in range(2):
        pairs = draw(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=5))
        filled = {name for name, value, _ in pairs if value}
        kept = {(name, value): prefix for name, value, prefix in pairs if value or name not in filled}
        sides.append([(f"{name}:prefix" if prefix else name, value) for (name, value), prefix in kept.items()])
    return label_selector(include=sides[0], exclude=sides[1])


def grouped(found: pb.LabelSet) -> dict[str, list[str]]:
    return {name: [label.value for label in group] for name, group in groupby(found.labels, lambda each: each.name)}


# ---------------------------------------------------------------------------------------------------------- building


def test_a_set_is_sorted_and_unique() -> None:
    found = label_set([("bb", "2"), ("aa", "x"), ("bb", "1"), ("bb", "2")], cc="y")
    assert labels.as_pairs(found) == (("aa", "x"), ("bb", "1"), ("bb", "2"), ("cc", "y"))
    assert labels.values_of(found, "bb") == ("1", "2")
    assert labels.value_of(found, "bb") == "1"
    assert labels.value_of(found, "zz", "none") == "none"


def test_changing_a_set_makes_a_new_set() -> None:
    found = label_set({"aa": "1", "bb": "2"})
    assert labels.as_pairs(labels.with_value(labels.add_value(found, "aa", "0"), "aa", "9")) == (
        ("aa", "9"),
        ("bb", "2"),
    )
    assert labels.as_pairs(labels.add_value(found, "aa", "0")) == (("aa", "0"), ("aa", "1"), ("bb", "2"))
    assert labels.as_pairs(labels.without(found, "aa")) == (("bb", "2"),)
    assert labels.as_pairs(labels.with_meta("a/journal", found)) == (("aa", "1"), ("bb", "2"), ("name", "a/journal"))
    assert labels.as_pairs(found) == (("aa", "1"), ("bb", "2"))


@pytest.mark.parametrize(
    ("pairs", "field", "problem"),
    [
        ([("a", "1")], "labels[0].name", "has 1 bytes"),
        ([("aa", "1"), ("a" * 65, "1")], "labels[1].name", "has 65 bytes"),
        ([("a=b", "1")], "labels[0].name", "character '='"),
        ([("aa", "a b")], "labels[0].value", "character ' '"),
        ([("aa", "x" * 1025)], "labels[0].value", "has 1025 bytes"),
        ([("aa", "1"), ("aa", "1")], "labels[1]", "unique and sorted"),
        ([("aa", "2"), ("aa", "1")], "labels[1]", "unique and sorted"),
        ([("bb", "1"), ("aa", "1")], "labels[1]", "sorted by name"),
        ([("aa", ""), ("aa", "1")], "labels[1]", "and an empty one"),
    ],
)
def test_malformed_sets_are_refused(pairs: list[tuple[str, str]], field: str, problem: str) -> None:
    message = pb.LabelSet(labels=[pb.Label(name=name, value=value) for name, value in pairs])
    with pytest.raises(InvalidInput, match=problem) as caught:
        labels.validate_label_set(message)
    assert caught.value.field == field


def test_prefixes_are_allowed_only_in_selectors() -> None:
    message = pb.LabelSet(labels=[pb.Label(name="aa", value="x", prefix=True)])
    labels.validate_selector(pb.LabelSelector(exclude=message))
    with pytest.raises(InvalidInput, match=r"labels\[0\]\.prefix"):
        labels.validate_label_set(message)


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([("name", "x")], "implied by the journal's name"),
        ([("prefix", "x")], "implied by the journal's name"),
        ([(labels.REGION, "a"), (labels.REGION, "b")], "may have only one"),
        ([(labels.CONTENT_TYPE, "a/b/c")], "not a media type"),
        ([(labels.CONTENT_TYPE, "")], "not a media type"),
        ([(labels.MESSAGE_TYPE, "T")], "needs the label content-type"),
        ([(labels.CONTENT_TYPE, "text/csv"), (labels.MESSAGE_SUBTYPE, "T")], "needs the label app.gazette.dev/message"),
    ],
)
def test_invalid_labels_of_journals_are_refused(pairs: list[tuple[str, str]], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        labels.validate_journal_labels(label_set(pairs))


def test_valid_labels_of_journals_are_accepted() -> None:
    labels.validate_journal_labels(
        label_set(
            [
                (labels.CONTENT_TYPE, labels.JSON_LINES),
                (labels.MESSAGE_TYPE, "Flight"),
                (labels.MESSAGE_SUBTYPE, "Late"),
                (labels.TAG, "one"),
                (labels.TAG, "two"),
            ]
        )
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "ab", "b c", "ba", "bé", "c" * 64, "d" * 65, "x=y"]),
            st.sampled_from(["", "a", "b=%", "é", "a b", "v" * 1024, "v" * 1025, "a\n"]),
            st.booleans(),
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_validity_of_label_sets_against_a_model(found: list[tuple[str, str, bool]], allow_prefix: bool) -> None:
    good_names, good_values = {"ab", "ba", "bé", "c" * 64}, {"", "a", "b=%", "é", "v" * 1024}
    valid = all(
        name in good_names and value in good_values and (allow_prefix or not prefix) for name, value, prefix in found
    ) and all(
        (name == later and "" < value < other) or name < later
        for (name, value, _), (later, other, _) in pairwise(found)
    )
    made = pb.LabelSet(labels=[pb.Label(name=name, value=value, prefix=prefix) for name, value, prefix in found])
    if valid:
        labels.validate_label_set(made, allow_prefix=allow_prefix)
    else:
        with pytest.raises(InvalidInput):
            labels.validate_label_set(made, allow_prefix=allow_prefix)


# ----------------------------------------------------------------------------------------------------------- algebra


@given(label_sets(), label_sets())
def test_algebra_against_a_model(left: pb.LabelSet, right: pb.LabelSet) -> None:
    mine, theirs = grouped(left), grouped(right)
    assert grouped(labels.union(left, right)) == {**theirs, **mine}
    assert grouped(labels.intersect(left, right)) == {
        name: mine[name] for name in mine if mine[name] == theirs.get(name)
    }
    assert grouped(labels.subtract(left, right)) == {
        name: mine[name] for name in mine if mine[name] != theirs.get(name)
    }


@given(label_sets(), VALUES, st.data())
def test_a_label_can_replace_others(right: pb.LabelSet, value: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([label.name for label in right.labels]) if right.labels else NAMES)
    before = pb.LabelSet.FromString(right.SerializeToString())
    result = labels.union(label_set({name: value}), right)
    assert grouped(result) == {**grouped(right), **grouped(label_set({name: value}))}
    assert [label.name for label in result.labels] == sorted(label.name for label in result.labels)
    assert right == before


@given(label_sets(), label_sets())
def test_algebraic_laws_hold(left: pb.LabelSet, right: pb.LabelSet) -> None:
    for result in (labels.union(left, right), labels.intersect(left, right), labels.subtract(left, right)):
        labels.validate_label_set(result)
    assert labels.intersect(left, right) == labels.intersect(right, left)
    assert labels.union(left, left) == left
    assert labels.union(labels.intersect(left, right), labels.subtract(left, right)) == left
    # Removing the added labels from a set that had none of these names restores the set.
    fresh = pb.LabelSet(labels=[label for label in right.labels if label.name not in grouped(left)])
    assert labels.subtract(labels.union(left, fresh), fresh) == left


# --------------------------------------------------------------------------------------------------------- selecting


@given(selectors(), label_sets())
def test_matching_against_a_model(selector: pb.LabelSelector, found: pb.LabelSet) -> None:
    def hit(wanted: pb.Label) -> bool:
        return any(
            label.name == wanted.name
            and (
                not wanted.value
                or label.value == wanted.value
                or (wanted.prefix and label.value.startswith(wanted.value))
            )
            for label in found.labels
        )

    excluded = any(hit(label) for label in selector.exclude.labels)
    names = {label.name for label in selector.include.labels}
    included = all(any(hit(label) for label in selector.include.labels if label.name == name) for name in names)
    assert matches(selector, found) is (included and not excluded)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", True),
        ("name = flights/events/part-000", True),
        ("name:prefix=flights/", True),
        ("name:prefix=flights/alerts", False),
        ("region in (us, eu), team", True),
        ("region in (us, ap)", False),
        ("region!=us", True),
        ("region!=eu", False),
        ("!region", False),
        ("!other,region=eu", True),
        ("region notin (us,ap)", True),
        ("team:prefix=data", True),
        ("team", True),
        ("other", False),
    ],
)
def test_journals_are_selected_by_name_and_labels(selector: str, expected: bool) -> None:
    found = labels.with_meta("flights/events/part-000", label_set({"region": "eu", "team": "data-platform"}))
    assert matches(parse_selector(selector), found) is expected


@given(selectors())
def test_selectors_round_trip_through_text(selector: pb.LabelSelector) -> None:
    text = labels.format_selector(selector)
    assert parse_selector(text) == selector
    assert labels.format_selector(parse_selector(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("foo = bar", "foo=bar"),
        ("foo == bar", "foo=bar"),
        ("foo==bar,baz!=bing", "foo=bar,baz!=bing"),
        ("baz != bing, foo", "foo,baz!=bing"),
        ("!foo", "!foo"),
        ("foo not in (b, a), bar in ( x ,y )", "bar in (x,y),foo notin (a,b)"),
        ("foo notin (a)", "foo!=a"),
        ("foo in (a)", "foo=a"),
        ("foo in (a,a)", "foo=a"),
        ("foo=", "foo"),
        ("foo!=", "!foo"),
        ("foo=a=b%c", "foo=a=b%c"),
        ("foo===b", "foo===b"),
        ("name:prefix = a/b/", "name:prefix=a/b/"),
        ("foo:prefix in (one/, two/)", "foo:prefix in (one/,two/)"),
        ("foo=a,foo=b", "foo in (a,b)"),
        ("foo,", "foo"),
        ("  foo  =  bar  ", "foo=bar"),
    ],
)
def test_text_is_parsed_into_its_canonical_form(text: str, canonical: str) -> None:
    assert labels.format_selector(parse_selector(text)) == canonical


def test_a_value_may_begin_with_an_equals_sign() -> None:
    assert labels.value_of(parse_selector("foo===b").include, "foo") == "=b"


@pytest.mark.parametrize(
    "text", ["f", "foo=b c", "foo,,bar", ",", "foo in ()", "foo in (a", "foo=!a", "foo in (a b)", "(foo)", "foo=a:b"]
)
def test_invalid_selectors_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_selector(text)
    assert caught.value.field == "selector"
    assert "name notin (a, b)" in str(caught.value) or "list of values" in str(caught.value)


@pytest.mark.parametrize("text", ["fo%o=a", "foo=a#b", "foo=,foo=a", "foo=a,foo:prefix=a"])
def test_invalid_labels_in_selectors_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"include\.labels"):
        parse_selector(text)


def test_the_legacy_prefix_is_rewritten() -> None:
    selector = parse_selector("prefix in (a/, b/), foo=bar, prefix!=c/")
    rewritten = labels.rewrite_legacy_prefix(selector)
    assert labels.format_selector(rewritten) == "foo=bar,name:prefix in (a/,b/),name:prefix!=c/"
    assert labels.rewrite_legacy_prefix(rewritten) == rewritten
    with pytest.raises(InvalidInput, match="must end in '/'"):
        labels.rewrite_legacy_prefix(parse_selector("prefix=a"))


@pytest.mark.parametrize(
    ("pairs", "whole"),
    [
        ({}, False),
        ({labels.CONTENT_TYPE: labels.JSON_LINES}, True),
        ({labels.CONTENT_TYPE: labels.CSV}, True),
        ({labels.CONTENT_TYPE: labels.FIXED_FRAMES}, False),
        ({labels.CONTENT_TYPE: labels.RECOVERY_LOG}, False),
        ({labels.CONTENT_TYPE: labels.JSON_LINES, labels.LINES: "any"}, False),
        ({labels.CONTENT_TYPE: "text/plain", labels.LINES: "whole"}, True),
    ],
)
def test_labels_determine_if_appends_end_with_a_newline(pairs: dict[str, str], whole: bool) -> None:
    found = labels.label_set(pairs)
    labels.validate_journal_labels(found)
    assert labels.takes_whole_lines(found) is whole


@pytest.mark.parametrize("values", [["some"], [""], ["any", "whole"]])
def test_the_label_of_lines_has_one_of_two_values(values: list[str]) -> None:
    with pytest.raises(InvalidInput, match=r"coranto\.dev/lines"):
        labels.validate_journal_labels(labels.label_set([(labels.LINES, value) for value in values]))
