"""An ingest as an asset: runs to the end of the source, as a service, and until terminated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from coranto.errors import StreamNotFound
from dagster_coranto import IngestMode, JournalResource, build_ingest_asset
from dagster_coranto.instance.underway import CONSUMER_TAG
from tests.orchestration.ingests.conftest import Place
from tests.orchestration.instances import new_instance
from tests.platform.ingest.postgres.database import ORDERS, SETTINGS, Database
from tests.sampling import sampled
from tests.servers.sql import PostgresServer

pytestmark = pytest.mark.integration


def materialize(
    place: Place, instance: dg.DagsterInstance, *, journals: JournalResource | None = None, **config: Any
) -> Any:
    asset = build_ingest_asset(place.file)
    ops = {asset.op.name: {"config": config}} if config else {}
    return dg.materialize(
        [asset],
        instance=instance,
        resources={"journals": journals or place.journals},
        run_config={"ops": ops},
        raise_on_error=False,
    )


def metadata(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    event = instance.get_latest_materialization_event(key)
    assert event is not None
    materialization = event.asset_materialization
    assert materialization is not None
    return {name.partition("/")[2]: each.value for name, each in materialization.metadata.items()}


def await_(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_ingests_the_current_rows(place: Place) -> None:
    place.put("a", {"n": 1}, {"n": 2})
    with new_instance() as instance:
        assert materialize(place, instance).success
        found = metadata(instance, place.key)
        assert (found["rows"], found["transactions"], found["lag"], found["dead_letters"]) == (2, 1, 0, 0)
        [row] = found["splits"].records
        assert row.data["split"] == "a.jsonl"
        first = instance.get_latest_materialization_event(place.key)
        place.put("b", {"n": 3})
        assert materialize(place, instance).success
        assert metadata(instance, place.key)["rows"] == 1
        last = instance.get_latest_materialization_event(place.key)
        versions = [each.asset_materialization.tags["dagster/data_version"] for each in (first, last)]  # type: ignore[union-attr,index]
        assert versions[0] != versions[1]
    assert place.events() == [1, 2, 3]


def test_tables_of_postgresql_are_ingested(place: Place) -> None:
    with PostgresServer(*SETTINGS) as server, Database(server) as database:
        database.execute(ORDERS)
        database.execute("INSERT INTO orders VALUES (1), (2)")
        content = json.loads(place.file.read_text())
        content["source"] = {"postgres": {"url": database.url, "publication": "shop"}}
        place.file.write_text(json.dumps(content))
        [spec] = build_ingest_asset(place.file).specs
        assert spec.kinds == {"journal", "postgresql"}
        with new_instance() as instance:
            assert materialize(place, instance).success
            found = metadata(instance, place.key)
            assert (found["rows"], found["dead_letters"]) == (2, 0)
            assert [row.data["split"] for row in found["splits"].records] == ["log", "public.orders"]
            database.execute("UPDATE orders SET cents = 1")
            assert materialize(place, instance).success
            assert metadata(instance, place.key)["rows"] == 2


def test_the_asset_describes_the_stream(place: Place) -> None:
    asset = build_ingest_asset(place.file, group_name="shop", kinds={"mine"}, tags={"tier": "1"})
    [spec] = asset.specs
    assert (spec.key, spec.group_name) == (place.key, "shop")
    assert {"journal", "file", "mine"} == spec.kinds
    assert (spec.tags["tier"], spec.tags[CONSUMER_TAG]) == ("1", place.name)


def test_the_prefix_of_the_resource_selects_the_stream(place: Place) -> None:
    place.put("a", {"n": 1})
    with new_instance() as instance:
        again = JournalResource(endpoint=place.cluster.endpoint, prefix="again/")
        assert materialize(place, instance, journals=again).success
        assert metadata(instance, place.key)["rows"] == 1
    with pytest.raises(StreamNotFound):
        place.events()
    place.stream = f"again/{place.stream}"
    assert place.events() == [1]


def test_the_error_of_a_poison_row_has_its_position(place: Place) -> None:
    place.put("a", {"n": 1})
    place.put("b", "poison")
    with new_instance() as instance:
        done = materialize(place, instance)
        assert not done.success
        [failure] = done.get_step_failure_events()
        assert "b.jsonl, offset 0" in str(failure.event_specific_data.error)  # type: ignore[union-attr]
    assert place.events() == [1]


def test_a_service_reports_materializations_and_ends_at_its_time_limit(place: Place) -> None:
    asset = build_ingest_asset(place.file, mode=IngestMode.SERVICE, report_seconds=0.2)
    place.put("a", {"n": 1})
    with new_instance() as instance:

        def later() -> None:
            await_(lambda: instance.get_latest_materialization_event(place.key) is not None)
            place.put("b", {"n": 2})

        thread = threading.Thread(target=later)
        thread.start()
        config = {"ops": {asset.op.name: {"config": {"for_seconds": 10}}}}
        done = dg.materialize([asset], instance=instance, resources={"journals": place.journals}, run_config=config)
        thread.join()
        assert done.success
        records = instance.fetch_materializations(place.key, limit=20).records
        assert len(records) >= 2
    assert place.events() == [1, 2]


def test_an_unknown_mode_is_refused(place: Place) -> None:
    with new_instance() as instance:
        done = materialize(place, instance, mode="forever")
        [failure] = done.get_step_failure_events()
        assert "'forever' is not a mode of an ingest; write drain or service" in str(
            failure.event_specific_data.error  # type: ignore[union-attr]
        )


def test_variables_are_read_when_the_asset_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    given = yaml.safe_load(place.file.read_text())
    given["source"]["files"]["url"] = "${NEW_FOLDER}"
    place.file.write_text(yaml.safe_dump(given))
    place.put("a", {"n": 1})
    with new_instance() as instance:
        done = materialize(place, instance)
        [failure] = done.get_step_failure_events()
        assert "the environment has no variable NEW_FOLDER" in str(failure.event_specific_data.error)  # type: ignore[union-attr]
        monkeypatch.setenv("NEW_FOLDER", f"file://{place.rows}/")
        assert materialize(place, instance).success


DEFINITIONS = """
from pathlib import Path
import dagster as dg
from dagster_coranto import IngestMode, JournalResource, build_ingest_asset

asset = build_ingest_asset(Path({file!r}), mode=IngestMode.SERVICE)
defs = dg.Definitions(
    assets=[asset],
    jobs=[dg.define_asset_job("job", selection=[asset.key], executor_def=dg.in_process_executor)],
    resources={{"journals": JournalResource(endpoint={endpoint!r})}},
)
"""


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT], 2))
def test_a_terminated_run_commits_and_the_next_one_continues(
    place: Place, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "defs.py").write_text(DEFINITIONS.format(file=str(place.file), endpoint=place.cluster.endpoint))
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").touch()
    place.put("a", *({"n": n} for n in range(100)))
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(tmp_path / "defs.py"), "-j", "job"]
    with subprocess.Popen(
        command, env={**os.environ, "DAGSTER_HOME": str(home)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            await_(lambda: process.poll() is not None or _count(place) == 100)
            place.put("b", *({"n": n} for n in range(100, 200)))
            process.send_signal(number)
            _, errors = process.communicate(timeout=90)
        finally:
            process.kill()
    assert b"Traceback" not in errors or b"Interrupt" in errors, errors.decode()
    with new_instance() as instance:
        assert materialize(place, instance).success
    assert place.events() == list(range(200))


def _count(place: Place) -> int:
    try:
        return len(place.events())
    except StreamNotFound:
        return 0
