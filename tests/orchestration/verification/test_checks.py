from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from coranto.audit import Depth, Finding, Kind, Report, Severity, Subject
from coranto.client.loop import run_blocking
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.journal_folders import MARKER
from coranto.testing.fake_broker import STORE, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import JournalGroup, JournalResource, build_audit_check, build_fragment_check
from dagster_coranto.verification.checks import as_result
from tests.orchestration.metadata import without_namespace

EVENTS = JournalGroup("flights/events")
PART = "flights/events/part-000"


@pytest.fixture
def journal(broker: FakeBroker, tmp_path: Path) -> FakeJournal:
    """A journal with three stored fragments and a live spool."""
    made = broker.create(PART, fragment=pb.JournalSpec.Fragment(stores=[STORE], compression_codec=pb.ZSTANDARD))
    for index in range(3):
        run_blocking(broker.write(PART, f"fragment {index}\n".encode() * 100))
        made.roll(tmp_path, Codec.ZSTANDARD)
    run_blocking(broker.write(PART, b"live\n"))
    return made


def file_of(root: Path, fragment: Fragment) -> Path:
    return root / "fragments" / fragment.content_path


def run_check(journals: JournalResource, **options: Any) -> dg.AssetCheckEvaluation:
    @dg.asset(key=["flights", "events"])
    def events() -> None: ...

    result = dg.materialize(
        [events, build_fragment_check(EVENTS, **options)], resources={"journals": journals}, raise_on_error=False
    )
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation


def run_audit(journals: JournalResource, **options: Any) -> dg.AssetCheckEvaluation:
    check = build_audit_check(EVENTS, **options)

    @dg.asset(key=["flights", "events"])
    def events() -> None: ...

    result = dg.materialize([events, check], resources={"journals": journals}, raise_on_error=False)
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation


def kinds_of(evaluation: dg.AssetCheckEvaluation) -> str:
    return str(without_namespace(evaluation.metadata)["kinds"])


def row_of(evaluation: dg.AssetCheckEvaluation) -> dict[str, Any]:
    shown: Any = evaluation.metadata["dagster-coranto/journals"]
    (record,) = shown.records
    return dict(record.data)


def findings(evaluation: dg.AssetCheckEvaluation) -> str:
    return str(without_namespace(evaluation.metadata)["findings"])


def test_sound_journals_pass_and_are_shown(journals: JournalResource, journal: FakeJournal) -> None:
    evaluation = run_check(journals)
    assert evaluation.passed
    assert evaluation.description == "1 journal is sound"
    assert row_of(evaluation) == {
        "journal": PART,
        "first": 0,
        "persisted_head": 3300,
        "head": 3305,
        "fragments": 3,
        "live_bytes": 5,
        "problems": 0,
    }


def test_journals_with_nested_names_are_distinguished(
    journals: JournalResource, journal: FakeJournal, broker: FakeBroker, tmp_path: Path
) -> None:
    inner = broker.create(f"{PART}/eu", fragment=pb.JournalSpec.Fragment(stores=[STORE], compression_codec=pb.NONE))
    run_blocking(broker.write(f"{PART}/eu", b"of another journal\n" * 1000))
    inner.roll(tmp_path, Codec.NONE)
    evaluation = run_check(journals)
    assert evaluation.passed, findings(evaluation)
    # This includes a deleted journal, found by the marker in its folder. Only its absence is a problem.
    del broker.journals[f"{PART}/eu"]
    file_of(tmp_path, inner.stored[0].fragment).with_name(MARKER).touch()
    evaluation = run_check(journals)
    assert without_namespace(evaluation.metadata)["kinds"] == "journal_gone"
    assert f"{PART}/eu: it existed at the last audit" in findings(evaluation)


def test_a_missing_object_fails_the_check_with_its_gap(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path
) -> None:
    lost = journal.stored[1].fragment
    file_of(tmp_path, lost).unlink()
    evaluation = run_check(journals)
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    assert f"bytes of content are gone, in [{lost.begin}, {lost.end})" in findings(evaluation)
    assert lost.content_path in findings(evaluation)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "garbage"])
def test_content_that_disagrees_with_its_name_fails_the_check(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path, damage: str
) -> None:
    broken = journal.stored[2].fragment
    content = bytearray(b"fragment 2\n" * 100)
    if damage == "flipped":
        content[500] ^= 1
    elif damage == "truncated":
        del content[-1:]
    elif damage == "longer":
        content += b"x"
    stored = b"not zstandard" if damage == "garbage" else compress(Codec.ZSTANDARD, bytes(content))
    file_of(tmp_path, broken).write_bytes(stored)
    evaluation = run_check(journals)
    assert not evaluation.passed
    assert broken.content_path in findings(evaluation)


def test_a_gap_in_the_index_fails_the_check(journals: JournalResource, journal: FakeJournal, tmp_path: Path) -> None:
    forgotten = journal.stored.pop(1).fragment
    file_of(tmp_path, forgotten).unlink()
    evaluation = run_check(journals)
    assert not evaluation.passed
    assert f"bytes of content are gone, in [{forgotten.begin}, {forgotten.end})" in findings(evaluation)


def test_content_removed_by_retention_is_not_a_gap(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path
) -> None:
    first = journal.stored[0].fragment
    file_of(tmp_path, first).unlink()
    journal.drop_before(first.end)
    journal.spec.fragment.retention.FromSeconds(3600)
    evaluation = run_check(journals)
    assert evaluation.passed
    assert row_of(evaluation)["first"] == first.end


def test_a_spool_that_differs_from_its_index_fails_the_check(
    broker: FakeBroker, journals: JournalResource, journal: FakeJournal
) -> None:
    item = journal.stored[2]
    local = Fragment(PART, item.fragment.begin, item.fragment.end, item.fragment.sum, Codec.ZSTANDARD)
    journal.stored[2] = type(item)(local, b"x" * item.fragment.length, "")
    evaluation = run_check(journals)
    assert not evaluation.passed
    assert f"damaged content at [{local.begin}, {local.end})" in findings(evaluation)


def put(root: Path, fragment: Fragment, content: bytes) -> Fragment:
    path = file_of(root, fragment)
    path.write_bytes(compress(fragment.codec, content))
    return fragment


def test_an_object_beyond_the_index_is_a_warning(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path
) -> None:
    stray = put(tmp_path, Fragment(PART, 9000, 9005, sum_of(b"stray"), Codec.NONE), b"stray")
    evaluation = run_check(journals)
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.WARN
    assert f"{STORE} has {stray.content_path}, and the brokers' index covers none" in findings(evaluation)


def test_an_object_inside_an_indexed_fragment_is_valid_if_its_content_is(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path
) -> None:
    inner = put(tmp_path, Fragment(PART, 0, 11, sum_of(b"fragment 0\n"), Codec.NONE), b"fragment 0\n")
    assert run_check(journals).passed
    put(tmp_path, inner, b"fragment x\n")
    evaluation = run_check(journals)
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    assert inner.content_path in findings(evaluation)


def test_the_severity_can_be_chosen(journals: JournalResource, journal: FakeJournal, tmp_path: Path) -> None:
    file_of(tmp_path, journal.stored[1].fragment).unlink()
    evaluation = run_check(journals, severity=dg.AssetCheckSeverity.WARN)
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.WARN


def test_a_loss_is_still_found_with_a_new_home_and_without_index_entries(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path
) -> None:
    """Each run of the check has a new Dagster instance."""
    assert run_audit(journals).passed
    first = journal.stored[0].fragment
    content = file_of(tmp_path, first).read_bytes()
    file_of(tmp_path, first).unlink()
    assert "content_lost" in kinds_of(run_audit(journals))
    journal.drop_before(first.end)  # The brokers have listed the store again.
    for _ in range(2):
        evaluation = run_audit(journals)
        assert not evaluation.passed
        assert kinds_of(evaluation) == "content_lost"
        assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    for depth in (Depth.CHEAP, Depth.DEEP):
        journal.stored.clear()
        assert "content_lost" in kinds_of(run_audit(journals, depth=depth))
    file_of(tmp_path, first).write_bytes(content)


def test_a_group_without_journals_fails_unless_allowed(journals: JournalResource, broker: FakeBroker) -> None:
    evaluation = run_audit(journals)
    assert kinds_of(evaluation) == "nothing_selected"
    assert not evaluation.passed
    assert run_audit(journals, allow_empty=True).passed


def test_unavailable_brokers_fail_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = JournalResource(endpoint="127.0.0.1:1", file_root=str(tmp_path))
    config = resource.client_config()
    monkeypatch.setattr(JournalResource, "client_config", lambda self: replace(config, retry_timeout=0.1))
    evaluation = run_audit(resource)
    assert not evaluation.passed
    assert evaluation.description == "the journals could not be examined"
    assert "127.0.0.1:1" in findings(evaluation)


def test_runs_with_a_budget_examine_all_content_in_turn(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path
) -> None:
    last = journal.stored[2].fragment
    file_of(tmp_path, last).write_bytes(compress(Codec.ZSTANDARD, b"fragment x\n" * 100))
    results = [run_audit(journals, depth=Depth.DEEP, budget=1).passed for _ in range(3)]
    assert results == [True, True, False]
    assert not run_audit(journals).passed, "a cheap audit repeats the stored finding"


def test_lost_records_of_earlier_audits_fail_the_check(
    journals: JournalResource, journal: FakeJournal, tmp_path: Path
) -> None:
    @dg.asset(key=["flights", "events"])
    def events() -> None: ...

    with dg.DagsterInstance.ephemeral() as instance:

        def audit() -> dg.AssetCheckEvaluation:
            assets = [events, build_audit_check(EVENTS)]
            result = dg.materialize(assets, resources={"journals": journals}, instance=instance, raise_on_error=False)
            (evaluation,) = result.get_asset_check_evaluations()
            return evaluation

        assert audit().passed
        assert audit().passed
        for record in (tmp_path / "fragments" / ".coranto-audit").iterdir():
            record.unlink()
        journal.drop_before(journal.stored[0].fragment.end)
        evaluation = audit()
        assert not evaluation.passed
        assert "memory_damaged" in kinds_of(evaluation)
        assert "its record is gone" in findings(evaluation)


def test_journals_with_problems_are_shown_first() -> None:
    names = [f"shop/part-{number:03d}" for number in range(150)]
    lost = Finding(Kind.CONTENT_LOST, Severity.ERROR, Subject.journal(names[-1]), "[0, 10) is gone")
    report = Report("shop", Depth.CHEAP, 1.0, 2.0, {name: {"head": 10} for name in names}, [lost])
    shown: Any = as_result(report, dg.AssetCheckSeverity.ERROR).metadata["dagster-coranto/journals"]
    rows = [dict(record.data) for record in shown.records]
    assert (rows[0]["journal"], rows[0]["problems"]) == (names[-1], 1)
    assert rows[1]["journal"] == names[0]
    assert rows[-1]["head"] == 10 * 50
