"""Texts that are made to keep a reader busy: templates, selectors, addresses, answers of stores, other input.

The time limit applies to a separate process, which is killed: superlinear readers take minutes or years for these
inputs, and linear ones a moment.
"""

from __future__ import annotations

import ast
import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import pytest

from coranto import labels
from coranto.effects import SystemClock
from coranto.errors import InvalidInput
from coranto.fragments.postfix import MAX_DEPTH, MAX_TEMPLATE_BYTES, MAX_WIDTH, PostfixTemplate
from coranto.security.tokens import Capability, Claims, Keys, sign
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild

MakeSpec = Callable[..., pb.JournalSpec]
KEY = base64.b64encode(bytes([1]) * 32).decode()
REPOSITORY = Path(__file__).parents[2]
HANGS = '{{ printf "' + '""' * 24
"""Each pair of quotes may be a text, or the end of one and the begin of another: 2**24 ways to read it."""
SECONDS = 60.0
"""Timeout for work that takes far less than a second on an idle machine."""


# ------------------------------------------------------------------------------------------------------ at a broker


def claims(capability: Capability, selector: str) -> tuple[tuple[str, str], ...]:
    now = SystemClock().now()
    token = sign(Claims(capability, labels.parse_selector(selector), now, now + 600), Keys.parse(KEY))
    return (("authorization", f"Bearer {token}"),)


async def test_a_broker_continues_after_any_template(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    child = BrokerChild(broker_settings, tmp_path / "log")
    child.start()
    try:
        client = await child.client()
        for template in (HANGS, "{{" + "(" * 1500 + "}}", '{{ printf "%999999999d" 1 }}', "{{" * 100_000):
            change = pb.ApplyRequest.Change(upsert=spec(fragment={"path_postfix_template": template}))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.Apply(pb.ApplyRequest(changes=[change]), timeout=SECONDS)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
        assert (await client.apply(spec())).status == pb.OK
        await client.close()
    finally:
        child.close()


async def test_a_missing_permission_is_reported_for_any_change(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_BROKER_AUTH_KEYS", KEY)
    child = BrokerChild(broker_settings, tmp_path / "log")
    child.start()
    try:
        client = await child.client()
        for template in (HANGS, "{{ nonsense }}", ""):
            change = pb.ApplyRequest.Change(upsert=spec("team-b/x", fragment={"path_postfix_template": template}))
            change.upsert.replication = 99
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.Apply(
                    pb.ApplyRequest(changes=[change]),
                    metadata=claims(Capability.APPLY, "name:prefix=team-a/"),
                    timeout=SECONDS,
                )
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await client.close()
    finally:
        child.close()


# -------------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("x" * (MAX_TEMPLATE_BYTES + 1), f"may have {MAX_TEMPLATE_BYTES}"),
        ("{{" + "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1) + "}}", f"nested deeper than {MAX_DEPTH}"),
        (f'{{{{ printf "%{MAX_WIDTH + 1}d" 1 }}}}', f"a width above {MAX_WIDTH}"),
        ('{{ printf "%' + "9" * 3000 + 'd" 1 }}', f"a width above {MAX_WIDTH}"),
        ("{{ " + "9" * 3000 + " }}", "more than 18 digits"),
        ("{{/* never closed }}", "not closed with */"),
        ('{{ "never closed }}', 'not closed with "'),
        ("{{ `never closed }}", "not closed with `"),
        ("{{ /* a */ .Name }}", "must be alone"),
        ("{{ .Name", "not closed with }}"),
    ],
)
def test_templates_beyond_the_limits_are_refused(template: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PostfixTemplate(template)
    assert problem in str(refused.value)
    assert refused.value.field == "path_postfix_template"


def test_templates_at_the_limits_are_accepted() -> None:
    deep = "(" * MAX_DEPTH + ".Begin" + ")" * MAX_DEPTH
    for template in (
        "{{" + deep.replace(".Begin", ".Spool.Begin") + "}}",
        f'{{{{ printf "%{MAX_WIDTH}d" 1 }}}}',
        "x" * MAX_TEMPLATE_BYTES,
        '{{/* quotes " and ends }} do not matter in a comment */}}',
    ):
        PostfixTemplate(template)


# ------------------------------------------------------------------------------------------------- every other input


def test_every_reader_of_input_is_linear() -> None:
    """The inputs include the text that one reader could parse in 2**24 ways, and many similar ones."""
    script = Path(__file__).with_name("hostile_inputs.py")
    try:
        done = subprocess.run([sys.executable, script, "2000"], capture_output=True, text=True, timeout=SECONDS * 4)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"it hangs at {(error.stdout or b'').decode().splitlines()[-1:]}")
    assert done.stdout.endswith("done\n"), done.stdout[-500:] + done.stderr


def test_parsing_a_selector_does_not_backtrack() -> None:
    """Twice the length takes twice the steps; otherwise a million characters would take hours."""
    for text in ("ab=" + " " * 1_000_000 + "(", "ab" * 500_000 + "(", "1" * 100):
        with pytest.raises(InvalidInput):
            labels.parse_selector(text)


REVIEWED: Final = {
    # Input from clients, stores and foreign files. Each takes one pass: a repetition is followed by a text that it
    # cannot match,
    # or does not backtrack (`*+`).
    "coranto.specs.durations": {"_PART"},
    "coranto.fragments.fragment": {"_HEX_OFFSET", "_HEX_SUM"},
    "coranto.fragments.go_time": {"_CHUNK"},
    "coranto.labels": {
        *("_PLAIN_NAME", "_PLAIN_VALUE", "_MEDIA_TYPE", "_EQUAL", "_NOT_EQUAL", "_IN", "_NOT_IN", "_EXISTS"),
        *("_NOT_EXISTS", "_SET_VALUE"),
    },
    "coranto.messages.column_parser": {"_AT_ROW"},
    "coranto.messages.columnar_lines": {"places"},
    "coranto.messages.csv_rows": {"_ROW", "_BEGIN_OF_ROW", "_FIELDS", "_NEEDS_QUOTES", "_UUID"},
    "coranto.messages.torn_lines": {"_TOKEN", "_BACKSLASHES"},
    "coranto.names": {"_ASCII"},
    "coranto.fragments.postfix": {"_TOKEN"},
    "coranto.fragments.windows": {"_NAME"},
    "coranto.fragments.store_errors": {"_STATUS", "_IN_XML", "_PLAIN_CODE", "_NO_CONNECTION", "_WHY_NO_CONNECTION"},
    "coranto.streams.model.positions": {"_PRODUCER"},
    "coranto.telemetry": {"_CONTROL_CHARACTERS"},
    "coranto_broker.http.requests": {"_RANGE", "_INTEGER"},
    "coranto.ingest.files.rows": {"_INTEGER", "_NOT_UTF8"},
    "coranto.ingest.kafka.options": {"_TOPIC"},
    "coranto.ingest.postgres.options": {"_SLOT", "_NOT_IN_SLOT"},
    "coranto.ingest.postgres.tables": {"_MODIFIER"},
    "coranto.ingest.postgres.values": {"_TOKENS", "_ESCAPE"},
    "coranto.types.kinds": {"_PLAIN_NAME"},
    "coranto.types.parsing": {"_TOKEN"},
    "coranto.types.references": {"_VERSION"},
    "coranto.types.writing": {"_DAY", "_LOCAL", "_ZONED", "_NUMBER"},
    "coranto_consumers.spark.inputs.frames": {"_ALL"},
    "coranto_consumers.spark.decoding.json_columns": {"_RUNS"},
    "coranto_consumers.spark.decoding.json_values": {"_INTEGER", "_DECIMAL", "_BASE64", "_TOKENS"},
    "coranto_consumers.spark.decoding.json_times": {
        *("_DATE", "_TIME", "_CLOCK_ALONE", "_CLOCK_WITH_MINUTES", "_DAYS_AS_NUMBER"),
        *("_ONE_HOUR_DIGIT", "_ONE_MINUTE_DIGIT", "_OFFSET", "_REGION"),
    },
    "coranto_consumers.spark.decoding.parsers": {"_INTEGER", "_NUMBER"},
    "coranto_consumers.spark.session.task_errors": {"_LINE", "_LACKING", "_NOT_DISCOVERED"},
    "coranto.publication.batch_ledger": {"_VALUE"},
    "coranto.publication.ledger": {"_SUMMARY_VALUE"},
    "coranto.streams.writer.multi_key.bulk": {"_VALUE"},
    "coranto.streams.writer.multi_key.numbered": {"_VALUE"},
    "coranto.streams.model.batch_content": {"_WRITER"},
    "coranto_consumers.runtime.batch_reading": {"_ESCAPED"},
    "coranto_consumers.spark.sink.message_rows": {"uuid"},
    "coranto_consumers.stores.mysql": {"_ENDS_TRANSACTION"},
    "coranto_consumers.stores.connection_errors": {"_STATE"},
    "coranto_consumers.stores.rejections": {"_IDENTIFIER", "_MYSQL_NAMES", "one that is not assigned to a name"},
    "coranto_consumers.stores.urls": {"_SECRET"},
    "dagster_coranto.resources.spark": {"_SECRET"},
    "dagster_coranto.translation.metadata": {"_BACKTICKS"},
    "dagster_coranto.translation.translator": {"_UNFIT"},
    # Names of our own files, validated names of journals, and settings of the process.
    "airflow_coranto.connection": {"line"},
    "airflow_coranto.offsets": {"one that is not assigned to a name"},
    "airflow_coranto.rows": {"_PLAIN"},
    "coranto.audit.journals": {"found"},
    "coranto.checkup.machine": {"numbers"},
    "coranto.cluster.etcd_program": {"found"},
    "coranto.ingest.option_fields": {"_VARIABLE"},
    "coranto_consumers.tables.spec": {"_CATALOG", "_ICEBERG_NAME", "_SQL_NAME"},
    "coranto.lake.compaction": {"_NAME"},
    "coranto.cli.selectors": {"one that is not assigned to a name"},
    "coranto_consumers.audit.expectations": {"_SEPARATOR", "_SUM"},
    "coranto.testing.histories": {"HEADER"},
    "coranto_broker.spool.durable_spool": {"readable"},
    "coranto_broker.recovery.set_aside": {"_NAME"},
    "coranto_broker.spool.recovery": {"_NAME"},
    "coranto_consumers.runtime.replica": {"one that is not assigned to a name"},
    "coranto_consumers.stores.iceberg.tables": {"_TRANSFORMED"},
    "coranto_consumers.stores.sql_dialects": {
        *("_MODIFIERS", "_REPLACE", "_LONE_RETURN", "one that is not assigned to a name"),
    },
    "coranto_consumers.stores.sql_text": {
        *("_PIECES", "_TARGET", "_WRITE", "_UPDATED", "_DELETED", "_INTO", "_UNNAMED_ROWS", "found"),
    },
    "coranto_consumers.spark.inputs.input_reader": {"one that is not assigned to a name"},
    "coranto_consumers.spark.options.selections": {"found", "one that is not assigned to a name"},
}
"""The places of regular expressions, by the name that each is assigned to."""


def test_every_regular_expression_was_reviewed() -> None:
    """A new one fails this test until it is on the list.

    Before, review its run time on foreign input, and have `hostile_inputs` read by it.
    """
    found: dict[str, set[str]] = {}
    for root in ("platform", "broker", "consumers", "orchestration"):
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            module = ".".join(path.relative_to(REPOSITORY / root).with_suffix("").parts)
            text = path.read_text(encoding="utf-8")
            for name in patterns_of(ast.parse(text)) if "import re" in text else ():
                found.setdefault(module, set()).add(name)
    assert found == REVIEWED


def patterns_of(module: ast.Module) -> Iterator[str]:
    """Yield the names that regular expressions, or their matches, are assigned to."""
    assigned = 0
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            calls = sum(map(is_expression, ast.walk(node.value)))
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if calls:
                assigned += calls
                yield ast.unparse(target)
    for _ in range(sum(map(is_expression, ast.walk(module))) - assigned):
        yield "one that is not assigned to a name"


def is_expression(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return ast.unparse(node.func.value) in ("re", "regex")
