"""`SyncStreams`: streams for blocking code."""

from __future__ import annotations

import pytest

from coranto.errors import StreamNotFound
from coranto.streams import Split, SyncStreams, SyncStreamWriter, default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL

NAME = "shop/orders"


def test_the_life_of_a_stream() -> None:
    with SyncCluster(brokers=1) as cluster, SyncStreams(client := cluster.client()) as streams:
        created = streams.create(NAME, template=default_template(stores=[STORE_URL]))
        assert streams.list() == (created,)
        with SyncStreamWriter(client, NAME) as writer:
            end = writer.write_event("alice", {"order": 7}).result().end
        assert streams.heads(created) == {0: end}
        scaled = streams.scale(NAME, [Split(0)])
        assert streams.resume(NAME) == streams.describe(NAME) == scaled
        truncated = streams.truncate(NAME, {1: 0, 2: 0})
        assert sorted(truncated.segments) == [1, 2]
        assert streams.seal(NAME).is_sealed
        streams.delete(NAME)
        with pytest.raises(StreamNotFound):
            streams.describe(NAME)
