"""The first consumer of docs/consumers.md, unchanged, on real brokers."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.testing import Cluster
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.testing import running_shard, shard_spec
from tools.settings_table import table

PAGE = Path(__file__).parents[2] / "docs" / "consumers.md"


async def test_the_first_consumer_keeps_totals_and_publishes(tmp_path: Path) -> None:
    text = PAGE.read_text()
    code = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    shards = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])
    line = re.findall(r"^\$ echo '(.*)' \|", text, re.MULTILINE)[0].encode() + b"\n"
    assert f"appended {len(line)} bytes at [0, {len(line)})" in text
    database = tmp_path / "totals.db"
    names: dict[str, Any] = {}
    exec(compile(code.replace("/tmp/totals.db", str(database)), PAGE, "exec"), names)
    shard = shards["shards"][0]
    (journal,) = (source["journal"] for source in shard["sources"])
    async with Cluster(brokers=1, lease_seconds=60) as cluster:
        for each in (journal, "alerts/large-customers"):
            await cluster.create(each, labels={CONTENT_TYPE: JSON_LINES})
        client = cluster.client()
        await client.append(journal, line)
        end = (await client.append(journal, b'{"customer": "bob", "cents": 1000001}\n' + line)).end
        async with running_shard(names["Totals"](), shard_spec(shard["id"], [journal]), client) as running:
            await running.read_through({journal: end})
            await running.finish()
        with closing(sqlite3.connect(database)) as connection:
            assert sorted(connection.execute("select * from totals")) == [("ada", 2 * 1990), ("bob", 1000001)]
        alerts = await client.read_all("alerts/large-customers", 0, await client.head("alerts/large-customers"))
        assert alerts.count(b'"customer":"bob"') == 1
        assert b"ada" not in alerts


def test_the_sites_table_has_every_setting() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", table("coranto_consumers.runtime.settings"), re.MULTILINE)
    assert dict(rows) == {name: field.description for name, field in ConsumerProcessSettings.model_fields.items()}
