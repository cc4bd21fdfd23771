"""The blocking state synchronizer on an in-process broker."""

from __future__ import annotations

import itertools

from pydantic import TypeAdapter

from coranto.streams import SyncStateSynchronizer
from coranto.testing import SyncCluster

JOURNAL = "team/members"


class Members:
    """A state model: a list of names that updates extend."""

    states = TypeAdapter(list[str])
    updates = TypeAdapter(str)

    def apply(self, state: list[str], update: str) -> list[str]:
        return [*state, update]


def test_two_synchronizers_share_one_state() -> None:
    with SyncCluster(brokers=1) as cluster:
        cluster.create(JOURNAL)
        with (
            SyncStateSynchronizer(cluster.client(), JOURNAL, Members()) as one,
            SyncStateSynchronizer(cluster.client(), JOURNAL, Members()) as other,
        ):
            assert one.initialize([]) == []
            assert one.is_loaded
            assert one.update(lambda state: "ann") == ["ann"]
            assert other.update(lambda state: None if "ann" in state else "ann") == ["ann"]
            assert other.update(lambda state: "bob") == ["ann", "bob"]
            assert one.fetch() == one.state == ["ann", "bob"]
            states = one.states()
            assert list(itertools.islice(states, 1)) == [["ann", "bob"]]
            states.close()  # type: ignore[attr-defined]
