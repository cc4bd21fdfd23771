"""Journal trees in YAML."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.labels import label_set
from coranto.specs.journal_tree import parse_tree, render_tree
from coranto.wire import protocol_pb2 as pb

TREE = """
name: foo/
replication: 3
labels:
- name: a-name
  value: a-val
fragment:
  length: 1234
  compression_codec: SNAPPY
  stores:
  - s3://a-bucket/
  - gs://another-bucket/
  refresh_interval: 1m0s
  retention: 1h0m0s
  flush_interval: 2m0s
  path_postfix_template: foo={{ .Spool.Begin }}
flags: O_RDWR
max_append_rate: 11223344
children:
- delete: true
  name: foo/bar
  revision: 99
- name: foo/baz/1
- name: foo/baz/2
  labels:
  - name: other-name
    value: ''
  revision: 1234
"""

MINIMAL = {
    "replication": 1,
    "fragment": {"length": 1024, "compression_codec": "NONE", "refresh_interval": "1s"},
}


def tree_of(**fields: Any) -> str:
    return yaml.safe_dump({**MINIMAL, **fields})


def test_a_tree_is_parsed() -> None:
    spec = pb.JournalSpec(
        name="foo/baz/1",
        replication=3,
        labels=label_set({"a-name": "a-val"}),
        fragment=pb.JournalSpec.Fragment(
            length=1234,
            compression_codec=pb.SNAPPY,
            stores=["s3://a-bucket/", "gs://another-bucket/"],
            refresh_interval=Duration(seconds=60),
            retention=Duration(seconds=3600),
            flush_interval=Duration(seconds=120),
            path_postfix_template="foo={{ .Spool.Begin }}",
        ),
        flags=pb.JournalSpec.O_RDWR,
        max_append_rate=11223344,
    )
    other = pb.JournalSpec()
    other.CopyFrom(spec)
    other.name = "foo/baz/2"
    other.labels.CopyFrom(label_set({"a-name": "a-val", "other-name": ""}))
    assert parse_tree(TREE) == [
        pb.ApplyRequest.Change(delete="foo/bar", expect_mod_revision=99),
        pb.ApplyRequest.Change(upsert=spec),
        pb.ApplyRequest.Change(upsert=other, expect_mod_revision=1234),
    ]


def test_rendering_moves_shared_fields_to_the_parent() -> None:
    journals = [(change.upsert, change.expect_mod_revision) for change in parse_tree(TREE) if not change.delete]
    assert render_tree(reversed(journals)) == TREE.lstrip().replace("name: foo/\n", "name: foo/baz/\n").replace(
        "- delete: true\n  name: foo/bar\n  revision: 99\n", ""
    )


def test_a_single_journal_is_its_own_tree() -> None:
    (change,) = parse_tree(tree_of(name="a/journal", suspend={"level": "PARTIAL", "offset": 5}, revision=-1))
    assert change.expect_mod_revision == -1
    assert change.upsert.suspend == pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.PARTIAL, offset=5)
    text = render_tree([(change.upsert, 7)])
    assert text.startswith("name: a/journal\nreplication: 1\nfragment:\n")
    assert text.endswith("suspend:\n  level: PARTIAL\n  offset: 5\nrevision: 7\n")
    assert parse_tree(text)[0].upsert == change.upsert


def test_an_empty_document_has_no_journals() -> None:
    assert parse_tree("") == []
    assert parse_tree("# only a comment\n") == []
    assert render_tree([]) == ""


def test_the_number_of_folders_is_minimal() -> None:
    names = ["a/b/c/x1", "a/b/c/x2", "a/b/d", "a/bcd", "e/f/g/h"]
    spec = parse_tree(tree_of(name="some"))[0].upsert
    journals = []
    for name in names:
        copy = pb.JournalSpec()
        copy.CopyFrom(spec)
        copy.name = name
        journals.append((copy, 1))
    document = yaml.safe_load(render_tree(journals))

    def outline(node: dict[str, Any]) -> Any:
        children = [outline(child) for child in node.get("children", [])]
        return (node.get("name", ""), children) if children else node["name"]

    assert outline(document) == (
        "",
        [("a/", [("a/b/", [("a/b/c/", ["a/b/c/x1", "a/b/c/x2"]), "a/b/d"]), "a/bcd"]), "e/f/g/h"],
    )


# Journals of every shape: few distinct values, so that some are shared and some are not.
PARTS = st.sampled_from(["aaaa", "bbbb", "b", "a-b", "été"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map("/".join).filter(lambda name: len(name.encode()) >= 4)


@st.composite
def journals(draw: st.DrawFn) -> list[tuple[pb.JournalSpec, int]]:
    result = []
    for name in sorted(draw(st.sets(NAMES, max_size=8))):
        pairs = {label: draw(st.sampled_from(["", "1", "2"])) for label in draw(st.sets(st.sampled_from(["x1", "x2"])))}
        spec = pb.JournalSpec(
            name=name,
            replication=draw(st.integers(1, 2)),
            labels=label_set(pairs),
            flags=draw(st.sampled_from([0, 1, 2, 4])),
            max_append_rate=draw(st.sampled_from([0, 7])),
            fragment=pb.JournalSpec.Fragment(
                length=draw(st.sampled_from([1024, 4096])),
                compression_codec=draw(st.sampled_from([pb.NONE, pb.GZIP])),
                stores=draw(st.sampled_from([[], ["file:///a/"], ["file:///a/", "s3://b/?profile=a%20b"]])),
                path_postfix_template=draw(
                    st.sampled_from(["", 'd={{ .Spool.FirstAppendTime.Format "2006" }}', "yes"])
                ),
                refresh_interval=Duration(seconds=draw(st.sampled_from([1, 300]))),
            ),
        )
        if draw(st.booleans()):
            spec.fragment.retention.seconds = draw(st.sampled_from([1, 90000]))
        if draw(st.booleans()):
            spec.suspend.offset = 12
        result.append((spec, draw(st.integers(1, 3))))
    return result


@given(journals())
def test_trees_round_trip(given_journals: list[tuple[pb.JournalSpec, int]]) -> None:
    changes = parse_tree(render_tree(given_journals))
    assert (
        sorted([(change.upsert, change.expect_mod_revision) for change in changes], key=lambda pair: pair[0].name)
        == given_journals
    )


def test_rendering_does_not_change_the_specs() -> None:
    specs = [change.upsert for change in parse_tree(TREE) if not change.delete]
    before = [spec.SerializeToString() for spec in specs]
    render_tree([(spec, 1) for spec in specs])
    assert [spec.SerializeToString() for spec in specs] == before


def test_fields_are_inherited_from_folders() -> None:
    text = """
name: a/
replication: 2
labels: [{name: keep, value: "1"}, {name: both, value: parent}]
fragment: {length: 1024, compression_codec: NONE, refresh_interval: 1s, stores: ["file:///x/"]}
flags: 1
children:
- name: a/b/
  labels:
  - {name: more, value: 007}
  - {name: both, value: child2}
  - {name: both, value: child1}
  fragment: {length: 2_048, stores: ["file:///y/"]}
  children:
  - name: a/b/cc
    flags: [O_RDWR]
    replication: 1
  - name: a/b/dd
"""
    first, second = (change.upsert for change in parse_tree(text))
    assert (first.replication, second.replication) == (1, 2)
    assert (first.flags, second.flags) == (pb.JournalSpec.O_RDWR, pb.JournalSpec.O_RDONLY)
    for spec in (first, second):
        assert spec.labels == label_set([("keep", "1"), ("both", "child1"), ("both", "child2"), ("more", "007")])
        assert list(spec.fragment.stores) == ["file:///y/"]
        assert spec.fragment.length == 2048
        assert spec.fragment.compression_codec == pb.NONE


def test_a_folder_can_be_deleted_except_for_one_journal() -> None:
    text = """
name: a/
delete: true
children:
- {name: a/one, revision: 4}
- {name: a/two, revision: -1}
- name: a/three
  delete: false
  replication: 1
  fragment: {length: 1024, compression_codec: NONE, refresh_interval: 1s}
"""
    deleted = [(change.delete, change.expect_mod_revision) for change in parse_tree(text)]
    assert deleted == [("a/one", 4), ("a/two", -1), ("", 0)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: [", "line 1: this is not YAML"),
        ("a: b\nname: x: y\n", "line 2: this is not YAML: .* put a text that contains `: ` into quotes"),
        ("- a\n- b\n", "line 1: fields are expected here"),
        ("{}", "the folder '' has no children"),
        ("replicas: 3\nname: a/journal\n", "line 1: there is no field 'replicas' here; known are"),
        ("name: a/journal\nfragment:\n  size: 3\n", "line 3: there is no field 'size' here; known are length"),
        ("name: a/journal\nlabels:\n- name: x\n  prefix: true\n", "line 4: there is no field 'prefix'"),
        ("name: a/journal\nlabels:\n- value: x\n", "line 3: a label needs a name"),
        ("name: a/journal\nlabels: {a: b}\n", "line 2: a list is expected"),
        ("name: a/journal\nlabels: [{name: x, value: y}]\n", r"labels: .*has 1 bytes"),
        ("name: a/journal\nname: a/other\n", "line 2: the field 'name' is given twice"),
        ("name: [a]\n", "line 1: a text is expected"),
        ("name: a/journal\nreplication: many\n", "line 2: 'many' is not a whole number"),
        ("name: a/journal\ndelete: maybe\n", "line 2: true or false"),
        ("name: a/journal\nflags: O_APPEND\n", "line 2: 'O_APPEND' is none of NOT_SPECIFIED, O_RDONLY"),
        ("name: a/journal\nflags: 3\n", "line 2: '3' is none of"),
        ("name: a/journal\nfragment:\n  retention: 30\n", "line 3: '30' is not a duration"),
        ("name: a/journal\nfragment:\n  compression_codec: gzip\n", "line 3: 'gzip' is none of INVALID, NONE, GZIP"),
        ("name: a/\nchildren: []\n", "the folder 'a/' has no children"),
        ("name: a/\nrevision: 3\nchildren: [{name: a/journal}]\n", "the folder 'a/' has a revision"),
        ("name: a/\nchildren:\n- name: b/journal\n", "line 3: the name 'b/journal' doesn't begin with its folder's"),
        ("name: a/journal\nchildren: [{name: a/journal/x}]\n", "line 1: a/journal has children"),
        (tree_of(name="a/", children=[{"name": "a/one"}, {"name": "a/one"}]), r"line \d+: a/one was already given"),
        (tree_of(name="a/one") + "delete: true\n", "a/one: revision: 0: to delete it, give"),
        (tree_of(name="a/one", revision=-2), "a/one: revision: -2 is less than 0"),
        (tree_of(name="a one"), "line 1: a one: name: 'a one' has the character ' '"),
        (tree_of(name="a/one", replication=9), "line 1: a/one: replication: 9 is not between 1 and 5"),
        (tree_of(name="a/one", fragment={}), "a/one: fragment.length: 0 bytes is not between"),
        (tree_of(name="a/one", suspend={"offset": -1}), "a/one: suspend.offset: -1 is less than 0"),
        ("&x\nname: a/\nchildren: [*x]\n", "refers to itself"),
        ("name: a/one\nfragment: &x\n  <<: *x\n", "line 2: .*refers to itself"),
    ],
)
def test_invalid_trees_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        parse_tree(text)


def test_anchors_and_merges_are_plain_yaml() -> None:
    text = """
name: a/
replication: 1
children:
- name: a/one
  fragment: &shared {length: 1024, compression_codec: NONE, refresh_interval: 1s}
- name: a/two
  fragment: &twice {<<: *shared, length: 2048}
- name: a/three
  fragment: {<<: [{length: 4096}, *twice], compression_codec: GZIP}
- name: a/four
  fragment: *twice
"""
    found = [change.upsert.fragment for change in parse_tree(text)]
    assert [fragment.length for fragment in found] == [1024, 2048, 4096, 2048]
    assert [fragment.compression_codec for fragment in found] == [pb.NONE, pb.NONE, pb.GZIP, pb.NONE]


def test_yaml_tags_run_no_code() -> None:
    with pytest.raises(InvalidInput):
        parse_tree("name: !!python/object/apply:os.system [echo]\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 50_000, "nested too deeply"),
        ("{a: " * 50_000, "nested too deeply"),
        (
            "- &a0 {name: a}\n" + "".join(f"- &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
            "more than 5000000 nodes",
        ),
        ("- &a0 {name: a}\n" + "".join(f"- &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)), "more than"),
        ("name: a/b\nreplication: 99999999999\n", "line 1: a/b: replication: 99999999999 does not fit"),
        ("name: a/b\nreplication: " + "9" * 5000, "line 2: .*64 bits"),
    ],
)
def test_oversized_input_is_refused_immediately(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        parse_tree(text)
