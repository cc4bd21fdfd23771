"""All commands, modules and operators in docs/airflow.md exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "airflow.md").read_text()
PACKAGE = ROOT / "orchestration" / "airflow_coranto"


def arguments(name: str) -> dict[str, tuple[str, bool]]:
    """Return the arguments of an operator or sensor, with the text of their defaults, and True for templates."""
    (path,) = (path for path in PACKAGE.rglob("*.py") if f"\nclass {name}(" in path.read_text())
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    made = classes[name]
    bases = [base.id for base in made.bases if isinstance(base, ast.Name) and base.id in classes]
    found = {argument: declared for base in bases for argument, declared in arguments(base).items()}
    templates = " ".join(ast.unparse(node) for node in made.body if isinstance(node, ast.AnnAssign))
    for start in made.body:
        if isinstance(start, ast.FunctionDef) and start.name == "__init__":
            for argument, default in zip(start.args.kwonlyargs, start.args.kw_defaults, strict=True):
                declared = "" if default is None else ast.unparse(default)
                found[argument.arg] = declared, f"'{argument.arg}'" in templates
    return found


OPERATORS = {
    name: templates
    for names, templates in re.findall(
        r"^\| (`\w+(?:Operator|Sensor)`.*?) \| .*? \| (`.*?`) \| .*? \|$", PAGE, re.MULTILINE
    )
    for name in re.findall(r"`(\w+)`", names)[:1]
}
"""The operators and sensors in the page's table, and the texts of their templates."""
COMMON = {"coranto_conn_id", "group"}
"""Arguments with the same meaning everywhere."""


def docstrings(name: str) -> str:
    """Return the docstrings of an operator or sensor, and of its base classes."""
    (path,) = (path for path in PACKAGE.rglob("*.py") if f"\nclass {name}(" in path.read_text())
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    return "\n".join([ast.get_docstring(classes[name]) or "", *map(docstrings, bases)])


def test_every_operator_and_sensor_is_in_the_table() -> None:
    classes = re.compile(r"^class ([A-Z]\w*)\(", re.MULTILINE)
    packages = [path.read_text() for package in ("operators", "sensors") for path in (PACKAGE / package).glob("*.py")]
    assert {name for text in packages for name in classes.findall(text)} == OPERATORS.keys()
    assert set(re.findall(r"`(\w+Operator|\w+Sensor)`", PAGE)) - {"HITLOperator"} <= OPERATORS.keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_table_names_templates_and_the_docstrings_all_arguments(name: str) -> None:
    declared = arguments(name)
    templates = {argument for argument, (_, is_template) in declared.items() if is_template}
    assert templates - {"coranto_conn_id"} == set(re.findall(r"`(\w+)`", OPERATORS[name]))
    described = docstrings(name)
    assert [each for each in declared.keys() - COMMON if not re.search(rf"`{each}\b", described)] == []


def test_every_named_module_exists() -> None:
    (table,) = re.findall(r"^\| module of `airflow_coranto` .*?(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    packages = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert len(packages) >= 6
    for names in packages:
        first, *others = re.findall(r"`([a-z.]+)`", names)
        package = first.partition(".")[0]
        for module in (first, *(package + other for other in others)):
            assert (PACKAGE / f"{module.replace('.', '/')}.py").is_file(), module


def test_every_named_target_of_make_exists() -> None:
    targets = set(re.findall(r"make ([a-z-]+)", PAGE))
    makefile = (ROOT / "Makefile").read_text()
    assert {"airflow", "test-airflow"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("name", ["constraints-airflow.txt", "constraints-airflow-oldest.txt"])
def test_versions_of_an_environment_are_recorded_without_addresses(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) > 100
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", line) for line in lines)


def test_the_oldest_versions_that_are_tested_are_those_that_are_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [each for each in project["optional-dependencies"]["airflow"] if each.startswith("apache-airflow")]
    tested = dict(line.split("==") for line in (ROOT / "constraints-airflow-oldest.txt").read_text().splitlines())
    assert len(required) == 4
    for each in required:
        name, _, versions = each.partition(">=")
        oldest = versions.partition(",")[0]
        assert f"{tested[name]}.".startswith(f"{oldest}."), each
