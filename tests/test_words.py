"""The wording rules that a program can check: idiom, first lines of docstrings, names, cancellation, the changelog."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("platform", "broker", "consumers", "orchestration")
SOURCES = (*PRODUCT, "tests", "benchmarks", "tools")
ROOTS = {"coranto": "platform", "coranto_broker": "broker", "coranto_consumers": "consumers"}

QUESTION = re.compile(r"(What|Whether|How|Where|Which|That|Who|Why|When|If)\b")
"""Beginnings of a docstring that are not an imperative or a noun phrase."""

VAGUE = re.compile(r"(Return|Yield|Tell|Report) (what|whether|why)\b")
"""Beginnings that do not name their object."""

FORBIDDEN = frozenset(
    [
        "Aside",
        "Crowded",
        "Face",
        "FaceSpec",
        "HandingFace",
        "Leftovers",
        "Looked",
        "Rota",
        "Settling",
        "Standing",
        "Verdict",
        "Verdicts",
        "foresee",
        "leftovers",
        "rota",
        "take_up",
        "taking_up",
        "tallies",
    ]
)
"""Names that hid their purpose or had several meanings, and that have a better replacement."""

IDIOM = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(anew|beside|heed|mend(s|ed)?|grave(st)?|in vain|patience|for ever)\b",
        r"\b(of|in|by|for|from|at|to|with|on|under|below) which\b",
        r"\bwhat (is|was|it|they|came|comes|goes|follows|others|nobody|only|a|the)\b",
        r"\bgo(es)? on\b|\bgoing on\b",
        r"\b(those|that) (of|which|who|whose)\b",
        r"\b(nobody|somebody|anybody|whoever)\b",
        r"\b(is|are|was|were|be) told\b|\btells? (of|what|that|how|whether|which)\b",
        r"\b(by then|by now|of then|at present|meanwhile)\b",
        r"\bat once\b|(?<!there )\bis no (?!longer)[a-z]|\bTake in\b",
    )
)
"""Phrases that stand for a shorter or more common one, such as `continues`, `immediately`, `next to` or `repairs`."""

LINK_TARGET = re.compile(r"\]\([^)]*\)")
DEFINITION = re.compile(r"\s*(?:async )?(?:def|class) (\w+)")
COMMENT = re.compile(r"(?:^|\s)# .*")

BUDGETS = {
    "broker/coranto_broker/fragments": 1,
    "consumers/coranto_consumers/recovery": 2,
    "docs": 1,
}
"""The maximum lines with such phrases in each package. A package without an entry has none.

Budgets only fall: lower the number when you remove a phrase.
"""

MAX_CHANGE = 150
"""The maximum length of a line of the changelog."""

SHARED_NAMES = {
    "Application": "the consumer's logic, in each of the two runtimes of consumers",
    "Publication": "the result of publishing, of the platform and of an asset",
}
"""Names that several public classes share, and their common meaning."""

PACKAGES = (
    "coranto.audit",
    "coranto.client",
    "coranto.messages",
    "coranto.streams",
    "coranto.testing",
    "coranto.types",
    "coranto_consumers.recoverylog",
    "coranto_consumers.stores",
)
MODULES = (
    "coranto.client.committed",
    "coranto.client.publishing",
    "coranto.coordination.etcd",
    "coranto.coordination.etcd_client",
    "coranto.coordination.keyspace",
    "coranto.coordination.lease",
    "coranto.fragments.stores",
    "coranto.streams.control.autoscale",
    "coranto_consumers.runtime.client",
    "coranto_consumers.runtime.testing",
)
"""Modules that users import from directly."""


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name or path.parent.name == "generated"


FILES = sorted(path for top in SOURCES for path in (ROOT / top).rglob("*.py") if not is_generated(path))


@dataclass(frozen=True)
class Words:
    """The classes of a file, and the lines and texts of its docstrings, including those after assignments."""

    docstrings: list[tuple[int, str]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)


@cache
def words_of(path: Path) -> Words:
    words = Words()
    for node in definitions(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            words.classes.append(node.name)
        if (text := ast.get_docstring(node)) is not None:
            words.docstrings.append((node.body[0].lineno, text))
        for before, after in pairwise(node.body):
            if isinstance(before, (ast.Assign, ast.AnnAssign)) and (text := text_of(after)) is not None:
                words.docstrings.append((after.lineno, text))
    return words


def definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a node and all descendants that may have docstrings. Expressions have none."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from definitions(child)


def text_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def path_of(module: str) -> Path:
    path = ROOT / ROOTS[module.split(".")[0]] / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_definitions() -> Iterator[tuple[str, ast.ClassDef | ast.AsyncFunctionDef]]:
    """Yield the classes and async functions that users can import, with their modules."""
    offered: dict[str, set[str] | None] = dict.fromkeys(MODULES)
    for package in PACKAGES:
        for node in ast.walk(ast.parse(path_of(package).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module not in MODULES:
                names = offered.setdefault(node.module, set())
                assert names is not None
                names.update(alias.name for alias in node.names)
    for module, names in offered.items():
        if module.split(".")[0] not in ROOTS:
            continue
        for node in ast.parse(path_of(module).read_text()).body:
            if not isinstance(node, (ast.ClassDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            if names is None or node.name in names:
                yield module, node


def without_cancellation_text(node: ast.ClassDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the awaitables that do not document cancellation. Methods without a docstring inherit it."""
    text = ast.get_docstring(node) or ""
    if "cancel" in text.lower():
        return []
    if isinstance(node, ast.AsyncFunctionDef):
        return [node.name]
    return [
        f"{node.name}.{method.name}"
        for method in node.body
        if isinstance(method, ast.AsyncFunctionDef)
        and not method.name.startswith("_")
        and "cancel" not in (ast.get_docstring(method) or ("cancel" if node.bases or implements(node) else "")).lower()
    ]


def implements(node: ast.ClassDef) -> bool:
    """Return True if the class says that it implements an interface, whose docstrings then apply to it."""
    return re.match(r"(An |The )?`\w+`", ast.get_docstring(node) or "") is not None


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers. Of tests and tools: comments, docstrings and names, since strings are data."""
    lines = enumerate(path.read_text().splitlines(), 1)
    product = path.suffix == ".md" or path.relative_to(ROOT).parts[0] in PRODUCT
    for number, line in lines:
        if named := DEFINITION.match(line):
            yield number, named[1].replace("_", " ")
        if product:
            yield number, LINK_TARGET.sub("]", line)
        elif comment := COMMENT.search(line):
            yield number, comment[0]
    if not product:
        for first, text in words_of(path).docstrings:
            yield from enumerate(text.splitlines(), first)


def lines_with_idiom() -> dict[str, list[str]]:
    """Return the lines with phrases of `IDIOM`, by package."""
    found: dict[str, list[str]] = {}
    for path in [*FILES, *sorted((ROOT / "docs").rglob("*.md"))]:
        if path == Path(__file__):
            continue
        parts = path.relative_to(ROOT).parts
        package = "docs" if parts[0] == "docs" else "/".join(parts[: min(3, len(parts) - 1)])
        for number, text in prose_of(path):
            if any(pattern.search(text) for pattern in IDIOM):
                found.setdefault(package, []).append(f"{path.relative_to(ROOT)}:{number}: {text.strip()}")
    return found


def test_no_package_has_more_invented_idiom_than_its_budget() -> None:
    found = {package: lines for package, lines in lines_with_idiom().items() if len(lines) > BUDGETS.get(package, 0)}
    assert not found, "use the words of the field: docs/glossary.md and CONTRIBUTING.md"


@pytest.mark.parametrize("top", SOURCES)
def test_the_first_line_of_a_docstring_is_an_imperative_or_a_noun_phrase(top: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        if path.is_relative_to(ROOT / top)
        for line, text in words_of(path).docstrings
        if QUESTION.match(text)
    ]
    assert not found, "start with an imperative or a noun phrase, without a question word"


@pytest.mark.parametrize("top", ["platform", "broker"])
def test_the_first_line_of_a_docstring_names_its_object(top: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        if path.is_relative_to(ROOT / top)
        for line, text in words_of(path).docstrings
        if VAGUE.match(text)
    ]
    assert not found, "say `Return True if …`, or name the thing that is returned"


def test_forbidden_names_are_not_used() -> None:
    found = []
    somewhere = re.compile("|".join(FORBIDDEN))
    for path in FILES:
        if path == Path(__file__) or not somewhere.search(path.read_text()):
            continue
        with tokenize.open(path) as file:
            found += [
                f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
                for token in tokenize.generate_tokens(file.readline)
                if token.type == tokenize.NAME and token.string in FORBIDDEN
            ]
    assert not found, "docs/glossary.md has the words to use instead"


def test_public_classes_have_unique_names() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in PRODUCT:
            for name in words_of(path).classes:
                if not name.startswith("_"):
                    places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    found = {name: where for name, where in places.items() if len(where) > 1 and name not in SHARED_NAMES}
    assert not found, "one name, one thing: rename one of them, or share the class"


def test_public_awaitables_document_cancellation() -> None:
    definitions = list(public_definitions())
    assert len(definitions) > 60
    found = [f"{module}: {name}" for module, node in definitions for name in without_cancellation_text(node)]
    assert not found, "add a sentence to the docstring of the method or of its class"


def test_each_entry_of_the_changelog_is_one_short_line() -> None:
    found = [
        f"CHANGELOG.md:{number}: {line}"
        for number, line in enumerate((ROOT / "CHANGELOG.md").read_text().splitlines(), 1)
        if len(line) > MAX_CHANGE or (line and not line.startswith(("# ", "## ", "### ", "#### ", "- ", "|")))
    ]
    assert not found, f"state a change in one line of at most {MAX_CHANGE} characters; details are in the documents"
