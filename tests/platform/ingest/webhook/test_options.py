"""The options of webhooks, and errors of wrong ones with their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto.ingest.spec import read_spec


def options(text: str, **environment: str) -> Any:
    return read_spec(f"name: hooks\nstream: s\nsource:\n  webhook: {{{text}}}\n", environment).options


def test_defaults() -> None:
    found = options('listen: ":8600"')
    assert (found.host, found.port, found.path, found.scheme) == ("127.0.0.1", 8600, "/", None)
    assert (found.window_seconds, found.window_keys, found.body_bytes) == (3600.0, 200_000, 4 << 20)
    assert options('listen: "[::1]:1"').host == "::1"


def test_all_options(tmp_path: Path) -> None:
    found = options(
        'listen: "0.0.0.0:80", path: /in, window: {seconds: 24h, keys: 7}, body: 10, memory: 1048576, requests: 5, '
        'receive: 2, timeout: 3, signature: {scheme: hmac, header: X-Mine, secrets: ["${A}", "${B}"]}',
        A="a",
        B="b",
    )
    assert (found.path, found.window_seconds, found.window_keys) == ("/in", 86400.0, 7)
    assert (found.scheme.header, found.keys()) == ("X-Mine", (b"a", b"b"))
    file = tmp_path / "secrets"
    file.write_text("one\n\ntwo \n")
    found = options(f'listen: ":1", signature: {{scheme: stripe, secret_file: {file}}}')
    assert found.keys() == (b"one", b"two")
    file.write_text("\n")
    with pytest.raises(InvalidInput, match="there is no secret"):
        found.keys()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("path: /", "the field 'listen' is missing"),
        ("listen: here", "'here' is not an address; give host:port"),
        ('listen: ":65536"', "is not an address"),
        ('listen: "0.0.0.0:80"', "0.0.0.0 can be reached by others: add `signature`"),
        ('listen: ":1", path: in', "'in' is not a path"),
        ('listen: ":1", path: /live', "neither /live nor /ready"),
        ('listen: ":1", window: {seconds: 8d}', "8d"),
        ('listen: ":1", window: {seconds: 604801}', "604801 is not a time between 0 and a week"),
        ('listen: ":1", receive: 2h', "2h is not a time between 0 and an hour"),
        ('listen: ":1", window: {keys: 500001}', "keys is 500001; it may be 1 to 500000"),
        ('listen: ":1", memory: 2000000, body: 1500000', "memory is 2000000; it must be twice the largest body"),
        ('listen: ":1", signature: {scheme: gitlab}', "scheme is 'gitlab'; it may be hmac, github"),
        ('listen: ":1", signature: {secrets: [a]}', "the field 'scheme' is missing"),
        ('listen: ":1", signature: {scheme: hmac}', "give either `secrets` or `secret_file`"),
        ('listen: ":1", signature: {scheme: hmac, secrets: [""]}', "a secret is empty"),
        ('listen: ":1", signature: {scheme: slack, header: X, secrets: [a]}', "leave `header` out"),
    ],
)
def test_wrong_options_are_refused(text: str, error: str) -> None:
    with pytest.raises(InvalidInput, match=r"line 4: ") as refused:
        options(text)
    assert error in str(refused.value)


def test_webhooks_have_no_schema() -> None:
    with pytest.raises(InvalidInput, match="webhook: requests have no schema"):
        read_spec(
            'name: h\nstream: s\nsource: {webhook: {listen: ":1"}}\ntype: a.B\nregistry: r/r\nregister: true\n', {}
        )
