"""Options of the source: parsed values, or an error that suggests the intended option."""

from pathlib import Path

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.spark.options.source_options import Isolation, SourceOptions

ENDPOINT = {"endpoint": "127.0.0.1:1"}


def test_defaults():
    options = SourceOptions.parse({**ENDPOINT, "subscribe": "a/one, b/two,a/one"})

    assert options.client.endpoint == "127.0.0.1:1"
    assert options.client.file_root is None
    assert options.selected.journals == ("a/one", "b/two")
    assert (options.starting, options.ending) == (None, None)
    assert options.isolation is Isolation.READ_COMMITTED
    assert options.framing.pointer == "/_meta/uuid"


def test_keys_are_case_insensitive():
    options = SourceOptions.parse(
        {
            "ENDPOINT": "b:1",
            "fileroot": "/srv/root",
            "Assign": '["a/one"]',
            "STARTINGoffsets": '{"a/one": -2}',
            "endingOffsets": '{"a/one": 7}',
            "Isolation": "READ_UNCOMMITTED",
            "maxbytesperpartition": "1024",
            "uuidPointer": "/id",
        }
    )

    assert options.client.file_root == Path("/srv/root")
    assert (options.starting, options.ending) == ({"a/one": -2}, {"a/one": 7})
    assert options.isolation is Isolation.READ_UNCOMMITTED
    assert (options.max_bytes, options.framing.pointer) == (1024, "/id")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"selector": "name"}, "option endpoint: is required"),
        (
            ENDPOINT,
            "one of assign, journal, prefix, subscribe, subscribePattern, selector, stream must be given, not none",
        ),
        ({**ENDPOINT, "assign": "[]", "selector": "x"}, "not assign, selector"),
        ({**ENDPOINT, "assign": "a/one"}, "option assign: not JSON"),
        ({**ENDPOINT, "assign": '"a/one"'}, "not a JSON list"),
        ({**ENDPOINT, "assign": "[]"}, "names no journal"),
        ({**ENDPOINT, "subscribe": "a/one,,"}, "names no journal"),
        ({**ENDPOINT, "selector": "x", "startingOffset": "earliest"}, "did you mean startingOffsets?"),
        (
            {**ENDPOINT, "selector": "x", "zzzzzz": "/tmp"},
            "zzzzzz: there is no such option; there are acceptJournals, asOf, ",
        ),
        ({**ENDPOINT, "selector": "x", "startingOffsets": "latest"}, "is neither earliest nor JSON"),
        ({**ENDPOINT, "selector": "x", "startingOffsets": "[1]"}, "not a JSON object"),
        ({**ENDPOINT, "selector": "x", "startingOffsets": '{"a/one": -1}'}, "-1 is not an offset for a/one"),
        ({**ENDPOINT, "selector": "x", "endingOffsets": '{"a/one": true}'}, "True is not an offset for a/one"),
        ({**ENDPOINT, "selector": "x", "isolation": "serializable"}, "not one of read_committed, read_uncommitted"),
        ({**ENDPOINT, "selector": "x", "isolation": "sequenced"}, "not one of read_committed, read_uncommitted"),
        (
            {**ENDPOINT, "selector": "x", "retryTimeout": "long"},
            "option retryTimeout: 'long' is not a number of seconds",
        ),
        ({**ENDPOINT, "selector": "x", "slices": "[]"}, "option slices: there is no such option"),
        ({**ENDPOINT, "journal": "a//one"}, "option journal"),
        ({**ENDPOINT, "prefix": ""}, "option prefix: is empty"),
        ({**ENDPOINT, "prefix": "a b/"}, "option prefix: "),
        ({**ENDPOINT, "journal": "a/one", "prefix": "a/"}, "not journal, prefix"),
        ({**ENDPOINT, "journal": "a/one", "timestampAsOf": "soon"}, "option timestampAsOf: 'soon' is not a time"),
        ({**ENDPOINT, "journal": "a/one", "timestampAsOf": "{}"}, "give JSON of journals' ends to asOf"),
        ({**ENDPOINT, "journal": "a/one", "timestampAsOf": "5", "asOf": "5"}, "timestampAsOf: asOf is given, too"),
        ({**ENDPOINT, "selector": "x", "maxBytesPerPartition": "0"}, "not a positive number of bytes"),
        ({**ENDPOINT, "selector": "x", "minPartitions": "0"}, "option minPartitions: '0' is not a positive number"),
        ({**ENDPOINT, "selector": "x", "maxRecordsPerPartition": "-1"}, "not a positive number, such as 8"),
        ({**ENDPOINT, "selector": "x", "maxBytesPerPartition": "1MB"}, "not a positive number of bytes"),
        ({**ENDPOINT, "selector": "x", "fragmentCacheBytes": "-1"}, "not a number of bytes"),
        (
            {**ENDPOINT, "selector": "x", "mode": "DROPMALFORMED"},
            "option mode: 'DROPMALFORMED' is not one of PERMISSIVE",
        ),
        ({**ENDPOINT, "selector": "x", "parse": "csv"}, "option parse: 'csv' is not json"),
        ({**ENDPOINT, "selector": "x", "failOnDataLoss": "yes"}, "neither true nor false"),
        ({**ENDPOINT, "selector": "x", "uuidPointer": "uuid"}, "option uuidPointer: 'uuid' is not a JSON pointer"),
    ],
)
def test_invalid_options_are_reported(options, problem):
    with pytest.raises(InvalidInput) as caught:
        SourceOptions.parse(options)
    assert problem in str(caught.value)


def test_one_journal_or_the_journals_of_a_folder_are_selected():
    assert SourceOptions.parse({**ENDPOINT, "journal": "a/one"}).selected.journals == ("a/one",)
    folder = SourceOptions.parse({**ENDPOINT, "Prefix": "a/topic/"}).selected
    assert (folder.journals, folder.selector) == (None, "name:prefix=a/topic/")


def test_a_point_in_time_accepts_the_names_of_delta_and_iceberg():
    given = {**ENDPOINT, "journal": "a/one"}
    for text in ("2026-03-01", "2026-03-01 00:00:00", "2026-03-01T01:00+01:00", "1772323200000"):
        assert SourceOptions.parse({**given, "timestampAsOf": text}).as_of == 1772323200
