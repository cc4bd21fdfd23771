"""Records of a cluster in etcd and in data directories, as brokers of other versions write and read them."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto_broker.recovery.identity import (
    ClusterIdentity,
    DirectoryIdentity,
    DirectoryUse,
    decode,
    encode,
)

CLUSTER = """{"id": "6f1c", "base": 40, "base_before": 30, "gathering": true, "gathered": ["local#broker-0"],
 "known": ["local#broker-0", "local#broker-1"], "before": ["5e0b"], "since": 0}"""
DIRECTORY = """{"cluster": "6f1c", "etcd": 14841639068965178418, "prefix": "/gazette/cluster",
 "broker": "local#broker-0", "word": "aa", "next_word": "bb", "revision": 77, "brokers": ["local#broker-0"]}"""
USE = '{"word": "aa", "place": "machine:/data"}'
WRITTEN: list[tuple[str, Any]] = [
    (
        CLUSTER,
        ClusterIdentity(
            "6f1c", 40, 30, True, ("local#broker-0",), ("local#broker-0", "local#broker-1"), ("5e0b",), since=0
        ),
    ),
    ('{"id": "6f1c"}', ClusterIdentity("6f1c")),
    (
        DIRECTORY,
        DirectoryIdentity(
            "6f1c", 14841639068965178418, "/gazette/cluster", "local#broker-0", "aa", "bb", 77, ("local#broker-0",)
        ),
    ),
    (
        '{"cluster": "6f1c", "etcd": 7, "prefix": "/p", "broker": "local#broker-0", "word": "aa"}',
        DirectoryIdentity("6f1c", 7, "/p", "local#broker-0", "aa"),
    ),
    (USE, DirectoryUse("aa", "machine:/data")),
    ('{"word": "aa"}', DirectoryUse("aa")),
]
"""Documents as earlier versions wrote them, also without later fields."""


@pytest.mark.parametrize(("text", "value"), WRITTEN)
def test_documents_of_earlier_versions_are_read(text: str, value: Any) -> None:
    assert decode(type(value), text.encode(), "here") == value


@pytest.mark.parametrize(("text", "value"), WRITTEN)
def test_earlier_versions_find_their_fields_in_current_documents(text: str, value: Any) -> None:
    now = json.loads(encode(value))
    assert json.loads(text).items() <= now.items()


@pytest.mark.parametrize(("text", "value"), WRITTEN)
def test_fields_that_a_later_version_adds_are_ignored(text: str, value: Any) -> None:
    later = {**json.loads(text), "added_later": {"a": 1}}
    assert decode(type(value), json.dumps(later).encode(), "here") == value


@pytest.mark.parametrize("text", [CLUSTER, DIRECTORY, USE])
def test_the_documents_here_have_all_fields(text: str) -> None:
    (kind,) = {type(value) for each, value in WRITTEN if each is text}
    assert json.loads(text).keys() == {field.name for field in fields(kind)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"word": 7}', '{"word": "aa", "place": null}'])
def test_an_invalid_document_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"identity\.json cannot be read"):
        decode(DirectoryUse, text.encode(), "identity.json")
