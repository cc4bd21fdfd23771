"""Options and offsets of streaming queries."""

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.spark.streaming.offsets import Position, loads
from coranto_consumers.spark.streaming.stream_options import StreamOptions, refuse_stream_options

GIVEN = {"endpoint": "127.0.0.1:8080", "assign": '["a/one"]'}


def test_options_have_the_defaults_of_kafkas_source():
    options = StreamOptions.parse(GIVEN)

    assert options.starting is None
    assert (options.max_bytes, options.max_messages, options.min_messages, options.max_delay) == (
        256 << 20,
        None,
        0,
        900,
    )
    assert options.committed


@pytest.mark.parametrize(
    ("text", "starting"),
    [
        ("earliest", {}),
        (" LATEST", None),
        ('{"a/one": 7, "a/two": -1, "a/three": -2}', {"a/one": Position(7), "a/two": None}),
        ('{"a/one": {"offset": 7, "created": 3}}', {"a/one": Position(7, 3)}),
    ],
)
def test_starting_offsets_are_words_or_json(text, starting):
    assert StreamOptions.parse({**GIVEN, "startingOffsets": text}).starting == starting


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("endingOffsets", "latest", "endingOffsets: a streaming query has no end"),
        ("startingOffsets", "newest", "neither 'earliest' nor 'latest' nor JSON"),
        ("startingOffsets", '{"a/one": "7"}', "'7' is not a position in a/one"),
        ("startingOffsets", '{"a/one": -7}', "-7 is not a position"),
        ("startingOffsets", '{"a/one": {"ofset": 7}}', "there is no 'ofset'"),
        ("maxBytesPerTrigger", "0", "'0' is not a positive number of bytes"),
        ("maxOffsetsPerTrigger", "many", "'many' is not a number of messages"),
        ("minOffsetsPerTrigger", "-1", "'-1' is not a number of messages"),
        ("maxTriggerDelay", "soon", "maxTriggerDelay: 'soon' is not a duration"),
        ("maxTriggerDelay", "-1s", "is negative"),
        ("maxBytesPerTriger", "1", "did you mean maxBytesPerTrigger"),
        ("trigger", "once", "trigger: 'once' is not processingTime"),
        ("isolation", "sequenced", "not one of read_committed, read_uncommitted"),
        ("maxRecordsPerPartition", "5", "is for spark.read"),
    ],
)
def test_bad_values_are_refused(option, value, problem):
    with pytest.raises(InvalidInput, match=problem):
        StreamOptions.parse({**GIVEN, option: value})


def test_a_minimum_above_the_maximum_is_refused():
    with pytest.raises(InvalidInput, match="8 is more than maxOffsetsPerTrigger, 7"):
        StreamOptions.parse({**GIVEN, "minOffsetsPerTrigger": "8", "maxOffsetsPerTrigger": "7"})


def test_given_limits_are_listed_by_name():
    assert StreamOptions.parse({**GIVEN, "maxOffsetsPerTrigger": "0"}).limits == ()
    given = {**GIVEN, "minOffsetsPerTrigger": "1", "maxBytesPerTrigger": "5", "trigger": "processingtime"}
    options = StreamOptions.parse(given)
    assert options.limits == ("maxBytesPerTrigger", "minOffsetsPerTrigger")
    assert options.processing_time
    assert not StreamOptions.parse(GIVEN).processing_time


def test_a_batch_read_refuses_the_options_of_queries():
    with pytest.raises(InvalidInput, match="maxBytesPerTrigger: is for readStream"):
        refuse_stream_options({"maxbytespertrigger": "1"})


@pytest.mark.parametrize(
    "raw",
    [
        {"offset": 1, "producers": {"01": [1, 2]}},
        {"offset": 1, "producers": {"010000000000": [1]}},
        {"offset": 1, "producers": {"010000000000": [1, 2, 3, 4]}},
        {"offset": 1, "producers": [1]},
        {"offset": True},
        {},
        None,
        1.5,
    ],
)
def test_a_checkpoint_with_other_offsets_is_refused(raw):
    with pytest.raises(InvalidInput, match="is not a position in a/one"):
        loads({"a/one": raw})
