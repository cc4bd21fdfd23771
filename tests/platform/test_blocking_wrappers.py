"""Every public asynchronous class has a blocking counterpart with the same methods and parameters."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import coranto.client
import coranto.streams
import coranto.testing
import coranto.types
from coranto_consumers.runtime.sync_client import SyncShardClient

TOOL = Path(__file__).parents[2] / "tools" / "generate_blocking.py"
PUBLIC = (coranto.client, coranto.streams, coranto.testing, coranto.types)


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_blocking", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
WRAPPERS = [wrapper for wrappers in tool.WRAPPERS.values() for wrapper in wrappers]
BLOCKING = {name: getattr(module, name) for module in PUBLIC for name in module.__all__ if name.startswith("Sync")}
BLOCKING["SyncShardClient"] = SyncShardClient
DIFFERENCES = {
    ("Cluster", "client"): {"name"},  # Blocking clients are distinguished by their connections.
    ("ReaderGroup", "reader"): {"reader_timeout"},  # `timeout` bounds the wait for each event.
    ("ReaderGroup", "initiate_checkpoint"): {"timeout"},
}
"""Parameters that only one of the two forms has."""


def asynchronous(name: str) -> type:
    (wrapper,) = (each for each in WRAPPERS if each.name == name)
    found: type = getattr(importlib.import_module(wrapper.module), name)
    return found


def is_asynchronous(member: Any) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


def test_every_public_asynchronous_class_has_a_blocking_class() -> None:
    public = {
        name
        for module in PUBLIC
        for name in module.__all__
        if inspect.isclass(found := getattr(module, name))
        and any(is_asynchronous(member) for key, member in vars(found).items() if not key.startswith("_"))
    }
    # Its methods are also methods of the client, which has a blocking class.
    assert public - {"AppendResult"} <= {wrapper.name for wrapper in WRAPPERS}


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.name)
def test_a_blocking_class_has_every_method_with_the_same_parameters(wrapper: Any) -> None:
    blocking = BLOCKING[f"Sync{wrapper.name}"]
    for name, member in vars(asynchronous(wrapper.name)).items():
        if name.startswith("_") or wrapper.without.get(name, tool.BY_HAND) != tool.BY_HAND:
            continue
        assert hasattr(blocking, name), f"{blocking.__name__} has no {name}"
        if not inspect.isfunction(member):
            continue
        wanted = inspect.signature(member).parameters.keys()
        present = inspect.signature(getattr(blocking, name)).parameters.keys()
        assert present ^ wanted == DIFFERENCES.get((wrapper.name, name), set()), name


def test_the_generated_classes_are_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["generate_blocking.py", "--check"])
    assert tool.main() == 0, capsys.readouterr().err


def test_the_check_finds_a_stale_class(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    less = tool.WrapperSpec(
        "coranto.client.append.appender", "Appender", {"begin": tool.INTERNAL, "abort": tool.INTERNAL}
    )
    monkeypatch.setattr(tool, "WRAPPERS", {"coranto.client.generated.wrappers": (less,)})
    monkeypatch.setattr(sys, "argv", ["generate_blocking.py", "--check"])
    assert tool.main() == 1
    assert "make wrappers" in capsys.readouterr().err


def test_omitting_an_unknown_method_is_refused() -> None:
    with pytest.raises(SystemExit, match="Appender has no commits"):
        tool.generated_class(tool.WrapperSpec("coranto.client.append.appender", "Appender", {"commits": tool.INTERNAL}))
