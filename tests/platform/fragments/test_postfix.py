"""Path postfix templates."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.postfix import PostfixTemplate
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb

FRAGMENT = Fragment("flights/events", 256, 261, sum_of(b"hello"), Codec.GZIP)
AT = datetime(2013, 1, 5, 7, 8, 9, tzinfo=UTC).timestamp()
REGISTERS = label_set({"author": "16i"})
SPEC = pb.JournalSpec(name="flights/events", replication=3, labels=label_set({"region": "us-east"}))


def render(template: str) -> str:
    return PostfixTemplate(template).render(FRAGMENT, AT, REGISTERS, SPEC)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ""),
        ("fixed/path", "fixed/path"),
        ('date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}', "date=2013-01-05"),
        (
            'date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}/hour={{ .Spool.FirstAppendTime.Format "15" }}',
            "date=2013-01-05/hour=07",
        ),
        ("{{.Spool.FirstAppendTime.UTC.Format `2006/01`}}", "2013/01"),
        ('{{ (.Spool.FirstAppendTime.UTC).Format "2006" }}', "2013"),
        (
            'year={{ .Spool.FirstAppendTime.Year }}/day={{ printf "%02d" .Spool.FirstAppendTime.Day }}',
            "year=2013/day=05",
        ),
        ('{{ .Spool.FirstAppendTime.Month }}-{{ printf "%02d" .Spool.FirstAppendTime.Month }}', "January-01"),
        ("{{ .Spool.FirstAppendTime.Weekday }}/{{ .Spool.FirstAppendTime.YearDay }}", "Saturday/5"),
        ('{{ .Spool.FirstAppendTime.Unix | printf "%x" }}', f"{int(AT):x}"),
        ('region={{ .JournalSpec.LabelSet.ValueOf "region" }}', "region=us-east"),
        ('region={{ .LabelSet.ValueOf "region" }}', "region=us-east"),
        ('author={{ .Spool.Registers.ValueOf "author" }}', "author=16i"),
        ('x={{ .Spool.Registers.ValueOf "absent" }}', "x="),
        ("{{ .Name }}/{{ .JournalSpec.Name }}/{{ .Spool.Journal }}", "/".join(["flights/events"] * 3)),
        ("r={{ .Replication }}", "r=3"),
        ('{{ printf "%08x-%d" .Spool.Begin .Spool.End }}', "00000100-261"),
        ("{{ .Spool.ContentLength }}", "5"),
        ('{{ print "a" .Spool.ContentLength "b" }}', "a5b"),
        ('{{ printf "%s=%v" "k" .Replication }}', "k=3"),
        ('{{ print (.LabelSet.ValueOf "region") "-1" }}', "us-east-1"),
        ('{{ "region" | .LabelSet.ValueOf | printf "%s/x" }}', "us-east/x"),
        ("a {{- /* a note */ -}} b", "ab"),
        ("a  {{- `-` -}}  b", "a-b"),
        ('{{ "100%" }}', "100%"),
        ('{{ printf "100%%" }}', "100%"),
    ],
)
def test_templates_are_rendered(template: str, expected: str) -> None:
    assert render(template) == expected


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ if .Name }}x{{ end }}", "'if' is not supported"),
        ("{{ range .Name }}", "'range' is not supported"),
        ("{{ $x := 1 }}", "is not supported"),
        ("{{ len .Name }}", "'len' is not supported"),
        ("{{ . }}", "is not supported"),
        ("{{ .Spool.FirstAppendTime", "not closed"),
        ("{{ .Spool", "not closed"),
        ("{{ }}", "a value is missing"),
        ("{{ .Name | }}", "a value is missing"),
        ("{{ (.Name }}", "'the end' is not supported"),
        ("{{ .Spool.NoSuchField }}", r"\.Spool\.NoSuchField is not known"),
        ("{{ .Name.Length }}", r"\.Name\.Length is not known"),
        ("{{ .Spool }}", "names a structure"),
        ("{{ .Spool.FirstAppendTime }}", r"names a structure.*\.Format"),
        ("{{ .Spool.FirstAppendTime.Format }}", r"Format takes 1 argument\(s\), not 0"),
        ('{{ .Spool.FirstAppendTime.Format "15" "04" }}', r"Format takes 1 argument\(s\), not 2"),
        ('{{ .Name "x" }}', "is not a method"),
        ('{{ "a" "b" }}', "cannot be given arguments"),
        ('{{ .Name | "b" }}', "cannot be given arguments"),
        ("{{ printf }}", "needs a format text"),
        ('{{ printf "%d" .Name }}', "cannot write '' with %d"),
        ('{{ printf "%d" }}', "more verbs than values"),
        ('{{ printf "x" 1 }}', "fewer verbs than values"),
        ('{{ "\\q" }}', "is not a quoted text"),
        ('{{ printf "%q" .Name }}', "cannot write '' with %q"),
    ],
)
def test_invalid_templates_are_refused_when_a_spec_is_validated(template: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        PostfixTemplate(template)
    assert caught.value.field == "path_postfix_template"
    assert repr(template) in str(caught.value)


@pytest.mark.parametrize("template", ["/rooted", "a//b", "../x", "a b", '{{ .Spool.FirstAppendTime.Format "Jan _2" }}'])
def test_results_that_are_not_paths_are_refused(template: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        render(template)
    assert caught.value.field == "path_postfix"
