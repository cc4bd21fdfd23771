"""Generate the blocking wrappers of asynchronous classes, or with `--check` report whether they are current.

A wrapper is an abstract class with one blocking method for each public method of the asynchronous class: same name,
parameters, defaults and first paragraph of documentation. A hand-written subclass defines the constructor and the
methods that cannot be derived. `WRAPPERS` lists the methods that a wrapper omits, with the reasons.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("platform", "consumers")
LOOP = "coranto.client.loop"
HANDOVER = "coranto.client.handover"
DOCUMENTATION_WIDTH = 104
INTERNAL = "for other modules of this package"
BY_HAND = "the subclass defines it"


@dataclass(frozen=True, slots=True)
class WrapperSpec:
    """One asynchronous class, and the methods that its wrapper omits, with the reason for each."""

    module: str
    name: str
    without: Mapping[str, str] = field(default_factory=dict)


WRAPPERS: Mapping[str, tuple[WrapperSpec, ...]] = {
    "coranto.client.generated.wrappers": (
        WrapperSpec(
            "coranto.client.client",
            "JournalClient",
            {
                "append": BY_HAND,
                "appender": BY_HAND,
                "close": BY_HAND,
                "note": INTERNAL,
                "of": BY_HAND,
                "prepare": INTERNAL,
                "read": BY_HAND,
                "prefetch_reads": INTERNAL,
            },
        ),
        WrapperSpec("coranto.client.append.appender", "Appender", {"begin": INTERNAL}),
        WrapperSpec(
            "coranto.client.append.service",
            "AppendService",
            {"append": BY_HAND, "append_nowait": "`append` blocks", "flush": BY_HAND, "cancel": BY_HAND},
        ),
    ),
    "coranto.streams.blocking.generated.wrappers": (
        WrapperSpec("coranto.streams.control.lifecycle", "Streams", {"ensure_part": INTERNAL}),
        WrapperSpec(
            "coranto.streams.writer.stream_writer",
            "StreamWriter",
            {
                "commit": INTERNAL,
                "close": BY_HAND,
                "drain": "each write already blocks its caller",
                "encode": INTERNAL,
                "ended": INTERNAL,
                "flush": BY_HAND,
                "key_hash": INTERNAL,
                "note_time": BY_HAND,
                "now": INTERNAL,
                "opened": INTERNAL,
                "transaction": BY_HAND,
            },
        ),
        WrapperSpec(
            "coranto.streams.writer.transactions", "Transaction", {"expire_if_due": INTERNAL, "raw_state": INTERNAL}
        ),
        WrapperSpec(
            "coranto.streams.writer.multi_key.writer",
            "MultiKeyWriter",
            {"close": BY_HAND, "transaction": BY_HAND},
        ),
        WrapperSpec("coranto.streams.writer.multi_key.transaction", "MultiKeyTransaction"),
        WrapperSpec(
            "coranto.streams.reader.stream_reader",
            "StreamReader",
            {"close": BY_HAND, "next_transaction": BY_HAND, "transactions": BY_HAND},
        ),
        WrapperSpec(
            "coranto.streams.groups.group_reader",
            "GroupReader",
            {"next_transaction": BY_HAND, "transactions": BY_HAND},
        ),
        WrapperSpec(
            "coranto.streams.groups.reader_groups", "ReaderGroup", {"initiate_checkpoint": BY_HAND, "reader": BY_HAND}
        ),
        WrapperSpec("coranto.streams.groups.state_synchronizer", "StateSynchronizer"),
    ),
    "coranto.types.generated.wrappers": (WrapperSpec("coranto.types.registry", "TypeRegistry"),),
    "coranto.testing.generated.wrappers": (
        WrapperSpec("coranto.testing.cluster", "Cluster", {"client": BY_HAND, "close": BY_HAND}),
    ),
    "coranto_consumers.runtime.generated.wrappers": (
        WrapperSpec("coranto_consumers.runtime.client", "ShardClient", {"close": BY_HAND}),
    ),
}


@dataclass(frozen=True, slots=True)
class FaceMethod:
    """A public method or property of a class."""

    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def is_property(self) -> bool:
        return any(isinstance(each, ast.Name) and each.id == "property" for each in self.node.decorator_list)

    @property
    def returns(self) -> str:
        assert self.node.returns is not None, f"{self.name} has no return type"
        return ast.unparse(self.node.returns)


def path_of(module: str) -> Path:
    """Return the file of a module. Raises SystemExit if there is none."""
    for root in SOURCE_ROOTS:
        path = ROOT / root / f"{module.replace('.', '/')}.py"
        if path.exists():
            return path
    raise SystemExit(f"module {module} has no file below {', '.join(SOURCE_ROOTS)}; correct WRAPPERS")


def class_of(wrapper: WrapperSpec) -> tuple[ast.Module, ast.ClassDef]:
    """Return the syntax trees of the module and the class of a wrapper's asynchronous class."""
    tree = ast.parse(path_of(wrapper.module).read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == wrapper.name:
            return tree, node
    raise SystemExit(f"{wrapper.module} has no class {wrapper.name}; correct WRAPPERS")


def methods_of(node: ast.ClassDef) -> Iterator[FaceMethod]:
    """Yield the public methods, in source order."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_"):
            yield FaceMethod(each)


def variables_of(node: ast.ClassDef) -> list[str]:
    """Return the type variables of a generic class."""
    for base in node.bases:
        if isinstance(base, ast.Subscript) and ast.unparse(base.value) == "Generic":
            inner = base.slice
            return [ast.unparse(each) for each in (inner.elts if isinstance(inner, ast.Tuple) else [inner])]
    return []


def documentation(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the first paragraph of a docstring, as the lines of a new docstring; no lines if there is none."""
    text = ast.get_docstring(node)
    if not text:
        return []
    lines = textwrap.wrap(text.split("\n\n")[0], DOCUMENTATION_WIDTH)
    return [f'"""{lines[0]}"""'] if len(lines) == 1 else [f'"""{lines[0]}', *lines[1:], '"""']


def call_of(method: FaceMethod) -> str:
    """Return a call of the asynchronous method with the parameters of the blocking one."""
    arguments = method.node.args
    given = [each.arg for each in (*arguments.posonlyargs, *arguments.args)[1:]]
    if arguments.vararg is not None:
        given.append(f"*{arguments.vararg.arg}")
    given += [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    return f"self._inner.{method.name}({', '.join(given)})"


def generated_method(method: FaceMethod) -> list[str]:
    """Return the lines of a blocking method."""
    node, returns, call = method.node, method.returns, call_of(method)
    body = documentation(node)
    head: list[str] = []
    inner = returns[returns.find("[") + 1 : -1]
    if method.is_property:
        head.append("@property")
        body.append(f"return self._call(lambda: self._inner.{method.name})")
    elif returns.startswith(("AsyncGenerator[", "AsyncIterator[")):
        returns = f"Iterator[{inner}]"
        body.append(f"return self._iterate(lambda: {call})")
    elif _returns_future(method):
        returns = f"concurrent.futures.Future[{inner}]"
        body.append(f"return self._submit(lambda: {call})")
    elif isinstance(node, ast.AsyncFunctionDef):
        body.append(f"return self._run({call})")
    else:
        body.append(f"return self._call(lambda: {call})")
    if returns == "None":
        body[-1] = body[-1].removeprefix("return ")
    head.append(f"def {method.name}({ast.unparse(node.args)}) -> {returns}:")
    return [*head, *(f"    {line}" for line in body)]


def _returns_future(method: FaceMethod) -> bool:
    return method.returns.startswith("asyncio.Future[")


def generated_class(wrapper: WrapperSpec) -> list[str]:
    """Return the lines of a wrapper."""
    _, node = class_of(wrapper)
    variables = variables_of(node)
    own = f"{wrapper.name}[{', '.join(variables)}]" if variables else wrapper.name
    base = (
        "QueuedWrapper"
        if any(_returns_future(method) for method in methods_of(node) if method.name not in wrapper.without)
        else "BlockingWrapper"
    )
    bases = f"{base}, Generic[{', '.join(variables)}]" if variables else base
    lines = [
        f"class {wrapper.name}Wrapper({bases}):",
        f'    """Blocking forms of the methods of `{wrapper.name}`, which documents guarantees and errors."""',
        "",
        "    @property",
        "    @abstractmethod",
        f"    def _inner(self) -> {own}:",
        '        """The asynchronous object. Use it on the loop only."""',
    ]
    names = {method.name for method in methods_of(node)}
    if stale := sorted(set(wrapper.without) - names):
        raise SystemExit(f"{wrapper.name} has no {', '.join(stale)}; correct WRAPPERS")
    for method in methods_of(node):
        if method.name not in wrapper.without:
            lines += ["", *(f"    {line}" for line in generated_method(method))]
    return lines


def names_in(lines: Iterable[str]) -> set[str]:
    """Return all names that generated code uses."""
    tree = ast.parse("\n".join(lines))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def imports_of(wrapper: WrapperSpec, used: set[str]) -> tuple[set[str], set[str]]:
    """Return the imports of the used names of a wrapper's module, and the type variables among these names."""
    tree, _ = class_of(wrapper)
    found: set[str] = set()
    variables: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                name = alias.asname or alias.name
                if name in used:
                    found.add(f"from {node.module} import {alias.name}" + (f" as {name}" if alias.asname else ""))
        elif isinstance(node, ast.Import):
            found |= {f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in used}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = node.name if isinstance(node, ast.ClassDef) else getattr(target, "id", "")
            if name not in used:
                continue
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar("):
                variables.add(f"{name} = {ast.unparse(node.value)}")
            else:
                found.add(f"from {wrapper.module} import {name}")
    return found, variables


def generated_module(wrappers: Iterable[WrapperSpec]) -> str:
    """Return the unformatted text of a module of wrappers."""
    body: list[str] = []
    imports = {
        "from abc import abstractmethod",
        f"from {LOOP} import BlockingWrapper",
        f"from {HANDOVER} import QueuedWrapper",
    }
    variables: set[str] = set()
    for wrapper in wrappers:
        lines = generated_class(wrapper)
        used = names_in(lines)
        if "asyncio" in used:
            used.discard("asyncio")
        found, declared = imports_of(wrapper, used)
        imports |= found
        variables |= declared
        imports |= {f"from {origin} import {name}" for origin, name in _STANDARD if name in used}
        if "concurrent" in used:
            imports.add("import concurrent.futures")
        body += ["", "", *lines]
    if variables:
        imports.add("from typing import TypeVar")
    head = [
        '"""Blocking wrappers of asynchronous classes. Generated by `tools/generate_blocking.py`; do not edit."""',
        "",
        "from __future__ import annotations",
        "",
        *sorted(imports),
        "",
        *sorted(variables),
    ]
    return "\n".join([*head, *body, ""])


_STANDARD = (("collections.abc", "Iterator"), ("typing", "Generic"))


def formatted(text: str, path: Path) -> str:
    """Return the text, formatted by the project's formatter."""
    for arguments in (["check", "--fix-only", "--select=I,F401", "--quiet"], ["format", "--quiet"]):
        command = [str(Path(sys.executable).parent / "ruff"), *arguments, f"--stdin-filename={path}", "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed wrappers, change nothing")
    check = parser.parse_args().check
    stale = []
    for module, wrappers in WRAPPERS.items():
        package = next(ROOT / root for root in SOURCE_ROOTS if (ROOT / root / module.split(".")[0]).is_dir())
        path = package / f"{module.replace('.', '/')}.py"
        fresh = formatted(generated_module(wrappers), path)
        if check:
            if not path.exists() or path.read_text() != fresh:
                stale.append(str(path.relative_to(ROOT)))
            continue
        path.parent.mkdir(exist_ok=True)
        init = path.parent / "__init__.py"
        init.write_text('"""Generated code; see `tools/generate_blocking.py`."""\n')
        path.write_text(fresh)
        print(f"wrote {path.relative_to(ROOT)}")
    if stale:
        print(f"blocking wrappers are not current: {', '.join(stale)}; run `make wrappers`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
