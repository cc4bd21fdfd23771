"""Fields of the YAML files of ingests and tables, read with errors that name the line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import yaml

from coranto.errors import InvalidInput
from coranto.specs.durations import parse_duration
from coranto.specs.yaml_fields import entries_of, items_of, line_error, line_of, read_integer, read_text

_HOURS: Final = {3600.0: "an hour", 604800.0: "a week"}


def required(node: yaml.Node, entries: Mapping[str, yaml.Node], *names: str) -> None:
    """Raise InvalidInput if a field is missing."""
    for name in names:
        if name not in entries:
            raise line_error(line_of(node), f"the field {name!r} is missing")


def checked(node: yaml.Node, check: Callable[[str], Any]) -> Any:
    """Return the result of `check` for a text. Adds the line to its errors."""
    try:
        return check(read_text(node))
    except InvalidInput as error:
        raise line_error(line_of(node), error.message) from None


def text(entries: Mapping[str, yaml.Node], name: str, default: str = "") -> str:
    return read_text(entries[name]) if name in entries else default


def texts(entries: Mapping[str, yaml.Node], name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(map(read_text, items_of(entries[name]))) if name in entries else default


def choice(entries: Mapping[str, yaml.Node], name: str, values: tuple[str, ...]) -> str:
    """Return a field that has one of these values, by default the first."""
    found = text(entries, name, values[0])
    if found not in values:
        raise line_error(line_of(entries[name]), f"{name} is {found!r}; it may be {', '.join(values)}")
    return found


def integer(entries: Mapping[str, yaml.Node], name: str, least: int, most: int, default: int) -> int:
    if name not in entries:
        return default
    value = read_integer(entries[name])
    if not least <= value <= most:
        raise line_error(line_of(entries[name]), f"{name} is {value}; it may be {least} to {most}")
    return value


def seconds(entries: Mapping[str, yaml.Node], name: str, default: float, most: float = 3600.0) -> float:
    """Return a time, given as a number of seconds or as a duration (`1m30s`)."""

    def check(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = parse_duration(given).ToNanoseconds() / 1e9
        if not 0 < value <= most:
            raise InvalidInput(f"{given} is not a time between 0 and {_HOURS.get(most, f'{most:g} seconds')}")
        return value

    return float(checked(entries[name], check)) if name in entries else default


def pairs(entries: Mapping[str, yaml.Node], name: str) -> dict[str, str]:
    """Return a mapping of texts to texts."""
    if name not in entries:
        return {}
    node = entries[name]
    keys = [read_text(key) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else ["name: value"]
    return {key: read_text(value) for key, value in entries_of(node, keys).items()}


_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expanded(node: yaml.Node, environment: Mapping[str, str]) -> yaml.Node:
    """Replace `${NAME}` variables in all texts, in place. Errors name the variable, never a value."""
    if isinstance(node, yaml.ScalarNode):
        for name in _VARIABLE.findall(node.value):
            if name not in environment:
                raise line_error(line_of(node), f"the environment has no variable {name}")
        node.value = _VARIABLE.sub(lambda found: environment[found[1]], node.value)
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            expanded(value, environment)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            expanded(value, environment)
    return node
