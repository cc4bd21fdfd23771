"""Marks: derived from the servers that tests and their fixtures start. Fast tests start no server."""

from __future__ import annotations

import ast
import itertools
import random
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.sampling import REST, SAMPLE, part_of, sampled

HERE = __file__.rpartition("/")[0]


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> ModuleType:
    """The module with the hooks of all tests, as pytest loaded it."""
    plugin = request.config.pluginmanager.get_plugin(f"{HERE}/conftest.py")
    assert isinstance(plugin, ModuleType)
    return plugin


def test_code_that_names_a_server_starts_one(conftest: ModuleType) -> None:
    def directly() -> object:
        return EtcdServer  # type: ignore[name-defined]  # noqa: F821

    def within() -> object:
        return [lambda: coranto.cluster.EmbeddedCluster()]  # type: ignore[name-defined]  # noqa: F821

    def nothing() -> str:
        return "EtcdServer"

    assert [conftest._starts_server(each) for each in (directly, within, nothing)] == [True, True, False]


def test_a_fast_test_that_starts_a_server_fails(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("integration") is None
    with pytest.raises(AssertionError, match=r"test_marks\.py::test_a_fast_test.* starts /no/such/etcd: mark it"):
        subprocess.run(["/no/such/etcd"], check=True)


@pytest.mark.integration
def test_a_marked_test_may_start_a_server() -> None:
    with pytest.raises(FileNotFoundError):
        subprocess.run(["/no/such/etcd"], check=True)


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_a_test_of_a_database_server_is_marked(request: pytest.FixtureRequest, database: str) -> None:
    assert (request.node.get_closest_marker("integration") is not None) == (database == "postgresql")


def test_a_sample_leaves_the_other_cases_to_the_exhaustive_run() -> None:
    kept = sampled(["a", "b", "c", "d"], 3)
    assert [each for each in kept if isinstance(each, str)] == ["a", "d"]
    assert [(each.values, each.marks[0].name) for each in kept[1:3]] == [(("b",), "exhaustive"), (("c",), "exhaustive")]
    with pytest.raises(ValueError, match=r"case 0 is a pytest\.param"):
        sampled([pytest.param(1)], 2)


def test_the_sample_and_the_rest_together_are_all_cases() -> None:
    assert part_of(SAMPLE, [1, 2, 3, 4], (2, 4)) == [2, 4]
    assert part_of(REST, [1, 2, 3, 4], (2, 4)) == [1, 3]
    with pytest.raises(ValueError, match=r"not among the cases: \[5\]"):
        part_of(REST, [1], [5])


def test_a_seed_determines_an_order_of_files_and_tests(conftest: ModuleType, request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.path.parent.name == "tests"]
    first, again, other = (conftest._shuffled(items, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first, key=items.index) == items
    paths = [item.path for item in first]
    assert len(list(itertools.groupby(paths))) == len(set(paths)), "the tests of a file run together"


def test_every_slow_test_has_its_file(conftest: ModuleType) -> None:
    root = conftest.SLOW_FILE.parent.parent
    missing = {path for path in (name.partition("::")[0] for name in conftest.SLOW) if not (root / path).exists()}
    assert missing == set(), "write tests/slow.txt again with `make slow`, or remove the lines"


def test_tests_of_the_exhaustive_list_exist(conftest: ModuleType) -> None:
    lines = conftest.EXHAUSTIVE_FILE.read_text().splitlines()
    assert lines == sorted(set(lines))
    root = Path(HERE).parent
    for path, listed in itertools.groupby(lines, lambda line: line.partition("::")[0]):
        names = {line.partition("[")[0].rpartition("::")[2] for line in listed}
        defined = {
            node.name
            for node in ast.walk(ast.parse((root / path).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert names <= defined, f"tests/exhaustive.txt lists tests of {path} that it does not have"


def test_a_listed_test_or_case_is_exhaustive(conftest: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "EXHAUSTIVE", frozenset({"a.py::whole", "a.py::some[1]"}))
    names = ["a.py::whole", "a.py::whole[1]", "a.py::some[1]", "a.py::some[2]", "a.py::other"]
    assert [conftest._is_exhaustive(name) for name in names] == [True, True, True, False, False]
