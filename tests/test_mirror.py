"""Tests mirror the packages: a module's tests are found by its name.

The tests of `platform/coranto/client/retry.py` are `tests/platform/client/test_retry.py`, and files such as
`test_retry_under_load.py`. The tests of a module without such a file are found through its importers in its package:
for a module of at most `SMALL` lines of code, any importer with tests; for a larger one, only if all importers lead to
the tests of one or two modules. A test file named like its package, such as `components/test_components.py`, tests the
modules of the package together. A module without a branch or a loop needs no tests.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
MIRRORS: Final = {
    "platform/coranto": "tests/platform",
    "broker/coranto_broker": "tests/broker",
    "consumers/coranto_consumers": "tests/consumers",
    "orchestration/dagster_coranto": "tests/orchestration",
    "orchestration/airflow_coranto": "tests/orchestration/airflow/installed",
}
OWN_TOOLS: Final = {"testing", "contract", "contracts", "generated", "wire"}
"""Packages of test support code. Their users' tests cover them."""
SMALL: Final = 60
DECISIONS: Final = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.Try,
    ast.Match,
    ast.comprehension,
    ast.BoolOp,
)

STREAM_CONTRACT: Final = "platform/streams/test_contract_t01_t14.py", "the contract of streams tests writers as a whole"
MEMBER: Final = "broker/server/test_process_health.py", "it is the life of a process, which takes a real one"
FIELDS: Final = "orchestration/translation/test_translator.py", "definitions are made of it, and their fields compared"
ONE_RUN: Final = "orchestration/consumers/test_one_run_at_a_time.py", "runs and their sensor need one another"
SECRETS: Final = "orchestration/translation/test_hostile_metadata.py", "it keeps secrets out of what Dagster shows"
OPERATORS: Final = "orchestration/airflow/installed/operators/test_operators.py", "the operators share it"
JOB_OF_AIRFLOW: Final = "orchestration/airflow/installed/test_flights.py", "it takes an Airflow and a cluster"
NO_AIRFLOW: Final = "it needs no Airflow"
ELSEWHERE: Final = {
    "coranto_consumers.audit.evidence": ("consumers/audit/test_check.py", "audits judge what it reads"),
    "coranto_consumers.positions.moves": ("consumers/cli/test_resetting.py", "the commands make them"),
    "coranto_consumers.stores.changing": ("consumers/cli/test_offsets.py", "the command changes what it says"),
    "coranto_consumers.stores.reading": ("consumers/cli/test_offsets.py", "the command prints what it reads"),
    "coranto.audit.findings": ("platform/audit/test_report.py", "the values that reports consist of"),
    "coranto.cli.reconciling": ("platform/cli/journals/test_applying.py", "the part that two commands share"),
    "coranto.client.store_probe": ("broker/fragments/test_store_probe.py", "brokers and `coranto doctor` share it"),
    "coranto.cli.journals.manifest": ("platform/lake/test_manifest.py", "manifests are made and read by one another"),
    "coranto.client.values": ("platform/client/test_client.py", "the values that calls return"),
    "coranto.lake.listing": ("platform/lake/test_manifest.py", "a manifest is what it lists"),
    "coranto.security.documents": ("platform/audit/test_signing.py", "reports and manifests are signed by it"),
    "coranto.cluster.foreground": ("platform/cli/test_with_cluster.py", "it is `coranto up`, a process of its own"),
    "coranto.member.health": MEMBER,
    "coranto.member.process": MEMBER,
    "coranto.security.server": (
        "broker/handlers/test_authorization.py",
        "it takes servers and clients with certificates",
    ),
    "coranto.streams.writer.open_transactions": STREAM_CONTRACT,
    "coranto.streams.writer.shared": STREAM_CONTRACT,
    "coranto.streams.writer.stamping": STREAM_CONTRACT,
    "coranto.streams.writer.stream_writer": STREAM_CONTRACT,
    "coranto.streams.writer.time_marks": (
        "platform/streams/model/test_watermarks.py",
        "watermarks are made of its marks",
    ),
    "coranto.streams.writer.units": STREAM_CONTRACT,
    "coranto_broker.replication.peer_copies": (
        "broker/fragments/test_store_refuses.py",
        "it takes brokers and a damaged disk",
    ),
    "coranto_broker.server.in_process": (
        "platform/testing/test_cluster.py",
        "tests' clusters are brokers of this kind",
    ),
    "coranto_consumers.outputs.dead_letters": (
        "consumers/spark/decoding/test_rows_misfits.py",
        "Spark consumers and shards keep them, each in its way",
    ),
    "coranto_consumers.outputs.log": ("orchestration/journals/test_io_manager.py", "the IO manager is its user"),
    "coranto_consumers.outputs.publishing": ("orchestration/journals/test_io_manager.py", "the IO manager is its user"),
    "coranto_consumers.recoverylog.directory": (
        "consumers/recoverylog/test_player_histories.py",
        "players replay what it did",
    ),
    "coranto_consumers.runtime.application": (
        "consumers/runtime/test_primary.py",
        "a shard at work calls it",
    ),
    "coranto_consumers.runtime.discovery": ("consumers/cli/test_consumer.py", "commands find a consumer by it"),
    "coranto_consumers.runtime.metrics": ("consumers/runtime/test_process.py", "a process serves them"),
    "dagster_coranto.flights.cli": ("system/test_main_job.py", "the demo is run as its users run it"),
    "dagster_coranto.instance.log": ("orchestration/flights/test_ui_processes.py", "it takes processes of Dagster"),
    "dagster_coranto.instance.underway": ONE_RUN,
    "dagster_coranto.resources.sql_store": SECRETS,
    "dagster_coranto.translation.options": FIELDS,
    "dagster_coranto.translation.sql_tables": FIELDS,
    "dagster_coranto.translation.vectors": ("orchestration/windows/test_windows.py", "`AsOf` finds what it keeps"),
    "airflow_coranto.connection": ("orchestration/airflow/test_connection.py", NO_AIRFLOW),
    "airflow_coranto.failures": OPERATORS,
    "airflow_coranto.flights.dags.flights": JOB_OF_AIRFLOW,
    "airflow_coranto.flights.standalone": JOB_OF_AIRFLOW,
    "airflow_coranto.links.report": ("orchestration/airflow/installed/test_pages.py", "the pages of Airflow show it"),
    "airflow_coranto.offsets": ("orchestration/airflow/test_offsets.py", NO_AIRFLOW),
    "airflow_coranto.queues.journal": (
        "orchestration/airflow/installed/test_get_provider_info.py",
        "Airflow finds it by its name",
    ),
    "airflow_coranto.rows": ("orchestration/airflow/test_rows.py", NO_AIRFLOW),
    "airflow_coranto.store": OPERATORS,
    "airflow_coranto.store_url": ("orchestration/airflow/test_store_url.py", NO_AIRFLOW),
}
"""Modules with tests of another name: the file of `tests`, and the reason."""


@cache
def modules() -> dict[str, tuple[Path, Path]]:
    """Return the modules that have tests: their files, and the folders of these tests."""
    found = {}
    for source, tests in MIRRORS.items():
        for path in sorted((ROOT / source).rglob("*.py")):
            inner = path.relative_to(ROOT / source).with_suffix("")
            if path.name not in ("__init__.py", "__main__.py") and OWN_TOOLS.isdisjoint(inner.parts):
                found[".".join((Path(source).name, *inner.parts))] = path, ROOT / tests / inner.parent
    return found


@cache
def imported(module: str) -> frozenset[str]:
    """Return the modules that a module imports: by statements anywhere in it, or by name, as `module:name`."""
    names = set()
    for node in ast.walk(ast.parse(modules()[module][0].read_text())):
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{each.name}" for each in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            names.add(node.value.partition(":")[0])
    return frozenset(names & modules().keys())


def package_of(module: str) -> str:
    return module.rpartition(".")[0]


@cache
def users(module: str) -> tuple[str, ...]:
    """Return the modules in a module's package that import it."""
    return tuple(each for each in modules() if package_of(each) == package_of(module) and module in imported(each))


@cache
def has_own_tests(module: str) -> bool:
    """Return True if a test file has the module's name, and no other module has a longer matching name."""
    path, folder = modules()[module]
    siblings = [each.stem for each in path.parent.glob("*.py")]

    def is_of(test: str, name: str) -> bool:
        return test == name or test.startswith(f"{name}_")

    tests = [each.stem.removeprefix("test_") for each in folder.glob("test_*.py")]
    if folder.name in tests and folder.name not in siblings:
        return True
    return any(
        max((each for each in siblings if is_of(test, each)), key=len, default="") == path.stem for test in tests
    )


@cache
def led_to(module: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the modules with tests of their own that cover a module: the module itself, or its importers."""
    if has_own_tests(module):
        return frozenset({module})
    ways = [led_to(each, seen | {module}) for each in users(module) if each not in seen]
    return frozenset[str]().union(*ways)


@cache
def lines_of_code(path: Path) -> int:
    """Return the number of lines that hold code, without comments and docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def decides(module: str) -> bool:
    """Return True if a module has a branch or a loop, except for `if __name__ ...`."""
    nodes = [*ast.walk(ast.parse(modules()[module][0].read_text()))]
    main = [node for node in nodes if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    return any(isinstance(node, DECISIONS) and node not in main for node in nodes)


def is_found(module: str) -> bool:
    """Return True if the rule above finds the tests of a module."""
    path, _ = modules()[module]
    tested = led_to(module)
    return len(tested) in (1, 2) or (bool(tested) and lines_of_code(path) <= SMALL) or not decides(module)


@pytest.mark.parametrize("source", MIRRORS)
def test_the_tests_of_each_module_are_found_by_its_name(source: str) -> None:
    package = Path(source).name
    lost = [
        each for each in modules() if each.split(".")[0] == package and each not in ELSEWHERE and not is_found(each)
    ]
    assert not lost, f"add `test_<module>.py` in {MIRRORS[source]}, or rename the test files of these modules"


def test_exceptions_are_needed_and_name_tests() -> None:
    for module, (tests, reason) in ELSEWHERE.items():
        assert module in modules(), f"there is no module {module}"
        assert not is_found(module), f"the tests of {module} are found by their name; remove it here"
        assert (ROOT / "tests" / tests).is_file(), f"{module}: there is no tests/{tests}"
        assert reason


@pytest.mark.parametrize("source", MIRRORS)
def test_folders_of_tests_mirror_packages(source: str) -> None:
    tests = ROOT / MIRRORS[source]
    others = {ROOT / each for each in ("tests/orchestration/airflow", *MIRRORS.values())} - {tests, *tests.parents}
    folders = {
        each.parent.relative_to(tests) for each in tests.rglob("test_*.py") if others.isdisjoint((each, *each.parents))
    }
    packages = {each.parent.relative_to(ROOT / source) for each in (ROOT / source).rglob("*.py")}
    assert folders - {Path("spark/cluster")} <= packages, "except for spark/cluster, each folder mirrors a package"
