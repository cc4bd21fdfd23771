"""Checks of fragment stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.checkup import Condition
from coranto.checkup.stores import store
from tests.servers.s3 import AwsKey, S3Server


async def test_a_read_only_store_is_reported(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.require_signatures(False)
    for name, value in (s3.environment | AwsKey("owner", "secret").environment).items():
        monkeypatch.setenv(name, value)
    url = s3.store_url("doctor")
    assert (await store(url, None)).condition is Condition.OK
    reader = s3.add_user("reader", "s3:ListBucket", "s3:GetObject")
    for name, value in reader.environment.items():
        monkeypatch.setenv(name, value)
    s3.require_signatures()
    try:
        result = await store(url, None)
    finally:
        s3.require_signatures(False)
    assert result.condition is Condition.PROBLEM
    assert "allowed: nothing" in result.found
    assert "put" in result.advice


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket("doctor")
        yield server


async def test_a_file_store_without_a_root_is_reported(tmp_path: Path) -> None:
    assert (await store("file:///", None)).condition is Condition.PROBLEM
    assert (await store("file:///", tmp_path)).condition is Condition.OK
