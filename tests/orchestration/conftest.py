from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coranto.client.loop import shared_loop
from coranto.testing.fake_broker import FakeBroker
from dagster_coranto import JournalResource


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker without a cluster, on the loop that blocking clients share."""
    made = FakeBroker()
    shared_loop().run(made.__aenter__())
    yield made
    shared_loop().run(made.__aexit__(None, None, None))


@pytest.fixture
def journals(broker: FakeBroker, tmp_path: Path) -> JournalResource:
    """The resource of `broker`, its fragment stores below the test's folder."""
    return JournalResource(endpoint=broker.endpoint, file_root=str(tmp_path))
