"""Sources of a member's settings. In order of precedence: command line, environment, configuration file, default.

The file is TOML, or YAML if its name ends in .yaml or .yml. Settings are top-level keys. An unknown key is an error.
"""

from __future__ import annotations

import difflib
import enum
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource

from coranto.errors import InvalidInput
from coranto.member.settings import MemberSettings

SettingsT = TypeVar("SettingsT", bound=MemberSettings)
FILE_VARIABLE = "config"
"""The environment variable that may name the configuration file, as `MemberSettings.variable` spells it."""


class Origin(enum.Enum):
    """The source of a setting."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Configuration(Generic[SettingsT]):
    """Settings, the sources of those that are not defaults, and warnings."""

    settings: SettingsT
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()


def load(kind: type[SettingsT], flags: Mapping[str, Any], file: Path | None = None) -> Configuration[SettingsT]:
    """Return the settings in effect. Without `file`, an environment variable may name the configuration file.

    Raises InvalidInput with the setting and its source if a setting is unknown or invalid.
    """
    if file is None and (named := os.environ.get(kind.variable(FILE_VARIABLE))):
        file = Path(named)
    layers = (
        (Origin.FILE, read_file(kind, file) if file is not None else {}),
        (Origin.ENVIRONMENT, dict(EnvSettingsSource(kind)())),
        (Origin.FLAG, dict(flags)),
    )
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for origin, layer in layers:
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    try:
        warnings = (*_unknown_variables(kind), *_readable_keys(kind, file, origins))
        return Configuration(kind(**values), origins, warnings)
    except ValidationError as error:
        problems = (_problem(kind, dict(each), origins, file) for each in error.errors(include_url=False))
        raise InvalidInput("; ".join(problems), field="settings") from None


def read_file(kind: type[MemberSettings], path: Path) -> dict[str, Any]:
    """Return the settings of a configuration file by name. Raises InvalidInput."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="config") from error
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidInput(f"{path} is neither TOML nor, with a name in .yaml, YAML: {error}", field="config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} does not hold settings by name, as in `port = 8080`", field="config")
    result = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in result.keys() - kind.model_fields.keys():
        raise InvalidInput(f"{path}: there is no setting {key!r}; {_hint(kind, key)}", field="config")
    return result


def render(configuration: Configuration[Any]) -> str:
    """Return the settings in effect as a configuration file, with the source of each. Secrets are not shown."""
    lines: list[str] = []
    for name, field in type(configuration.settings).model_fields.items():
        value = getattr(configuration.settings, name)
        origin = configuration.origins.get(name, Origin.DEFAULT).value
        lines.append(f"# {field.description}")
        if isinstance(value, SecretStr):
            lines.append(f"# {name} is {'set, and not shown' if value.get_secret_value() else 'not set'} ({origin})")
        elif value is None:
            lines.append(f"# {name} is not set ({origin})")
        else:
            lines.append(f"{name} = {_toml(value)}  # {origin}")
    return "\n".join(lines)


def _hint(kind: type[MemberSettings], name: str) -> str:
    nearest = difflib.get_close_matches(name, kind.model_fields, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else f"`{kind.command} settings` lists all settings"


def _unknown_variables(kind: type[MemberSettings]) -> Iterator[str]:
    """Yield a warning for each unknown variable. It is not an error, because other programs share the environment."""
    for variable in sorted(os.environ):
        name = variable.lower().removeprefix(kind.variable("").lower())
        if variable.lower() != name and name not in {FILE_VARIABLE, *kind.model_fields}:
            yield f"${variable} is not a setting; {_hint(kind, name)}"


def _readable_keys(kind: type[MemberSettings], file: Path | None, origins: Mapping[str, Origin]) -> Iterator[str]:
    has_keys = any(origins.get(name) is Origin.FILE for name in kind.secrets())
    if file is not None and has_keys and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield f"{file} holds keys, and can be read by users other than its owner; chmod 600 it"


def _problem(
    kind: type[MemberSettings], error: dict[str, Any], origins: Mapping[str, Origin], file: Path | None
) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    origin = origins.get(name, Origin.DEFAULT)
    said = {
        Origin.FILE: f" ({file})",
        Origin.ENVIRONMENT: f" (${kind.variable(name)})",
        Origin.FLAG: f" (--{name.replace('_', '-')})",
    }.get(origin, "")
    value = "" if name in kind.secrets() else f", not {error['input']!r}"
    return f"{name}{said}: {error['msg']}{value}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = str(getattr(value, "value", value))
    # A basic string of TOML. It assumes that settings have no control characters, which would need escapes too.
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
