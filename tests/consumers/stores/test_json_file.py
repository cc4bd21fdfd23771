"""Stores in JSON files in a recovery log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.client import JournalClient
from coranto.errors import CorruptData
from coranto.messages import Checkpoint, ProducerId, ProducerState, Source
from coranto.messages.checkpoints import Identity
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.stores.contract import SHARD, StoreContract, commit
from coranto_consumers.stores.json_file import JsonFileStore, checkpoint_from_json, checkpoint_to_json
from tests.consumers.stores.in_logs import JsonSubject


class TestJsonFileStore(StoreContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> JsonSubject:
        return JsonSubject(tmp_path)


async def test_the_file_has_the_layout_of_gazette(tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)
    store = await subject.open()
    store.state.extend([1, 2])
    producers = {ProducerId(b"\x01abcde"): ProducerState(5, 0)}
    sources = {"a/journal": Source(7, producers), "b/journal": Source(0)}
    await (await store.start_commit(SHARD, Checkpoint(sources, {"c/journal": b"ack"}), []))
    folder = (await subject.recover()).directory
    assert [path.name for path in folder.iterdir()] == ["state.json"]
    assert (folder / "state.json").read_text().splitlines() == [
        '{"a/journal":7,"b/journal":0}',
        "[1,2]",
        '{"sources":{"a/journal":{"read_through":7,"producers":[{"id":"AWFiY2Rl","state":{"last_ack":5}}]},'
        '"b/journal":{"producers":null}},"ack_intents":{"c/journal":"YWNr"}}',
    ]


async def test_states_of_other_types_are_dumped_and_loaded(tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)

    def new_store(recorder: Recorder) -> JsonFileStore[Any]:
        return JsonFileStore(recorder, {3}, dump=sorted, load=set)

    subject.store = new_store
    store = cast(JsonFileStore[set[int]], await subject.open())
    store.state.add(1)
    await commit(store, 100)
    assert cast(JsonFileStore[set[int]], await subject.open()).state == {1, 3}


async def test_a_state_that_is_not_json_is_refused_without_side_effects(tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)
    store = cast(JsonFileStore[list[Any]], await subject.open())
    store.state.append(object())
    with pytest.raises(TypeError):
        await commit(store, 100)
    store.state[:] = [float("nan")]
    with pytest.raises(ValueError, match="JSON"):
        await commit(store, 100)
    store.state[:] = ["ünïcode \u2028"]
    await commit(store, 100)
    assert cast(JsonFileStore[list[Any]], await subject.open()).state == ["ünïcode \u2028"]


@pytest.mark.parametrize(
    "content", ["", "{}\n[]\n", "{}\n[]\n{}\n{}\n", "nonsense", '{}\n[]\n{"sources":5}\n', "{}\n[]\n5\n"]
)
async def test_a_file_of_another_format_is_refused(content: str, tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)
    recovery = await subject.recover()
    async with Recorder(cast(JournalClient, subject.journals), recovery) as recorder:
        recorder.create("state.json")
        (recorder.directory / "state.json").write_text(content)
        with pytest.raises(CorruptData):
            JsonFileStore(recorder, [])


@given(
    st.dictionaries(
        st.sampled_from(["a/b", "c/d"]),
        st.builds(
            Source,
            st.integers(0, 1 << 62),
            st.dictionaries(
                st.binary(min_size=6, max_size=6).map(ProducerId),
                st.builds(
                    ProducerState, st.integers(0, (1 << 64) - 1), st.integers(-1, 1 << 62), st.integers(0, 1 << 62)
                ),
                max_size=3,
            ),
        ),
    ),
    st.dictionaries(st.sampled_from(["e/f", "g/h"]), st.binary(min_size=1)),
)
def test_checkpoints_survive_json(sources: dict[str, Source], intents: dict[str, bytes]) -> None:
    original = Checkpoint(sources, intents)
    restored = checkpoint_from_json(json.loads(json.dumps(checkpoint_to_json(original))))
    assert restored == original
    assert restored.to_bytes() == original.to_bytes(), "also fields that are not compared"


def test_a_checkpoint_in_json_keeps_journal_ids_identity_and_batch():
    identity = Identity(
        "name:prefix=a/", frozenset({"table x", "table y"}), frozenset({"table y"}), "postgresql://db/x"
    )
    known = Checkpoint({"a/b": Source(7, journal_id="id-1")}, {"c/d": b"ack\n"}, identity, '{"digest":"ab"}')
    assert checkpoint_from_json(json.loads(json.dumps(checkpoint_to_json(known)))) == known
    assert Checkpoint.from_bytes(known.to_bytes()) == known
    plain = Checkpoint({"a/b": Source(7)})
    assert set(checkpoint_to_json(plain)) == {"sources"}
