"""Generate the site's tables of settings from the source of the classes of settings, without importing them."""

from __future__ import annotations

import ast
import operator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEMBER = "platform/coranto/member/settings.py"
SETTINGS = {
    "coranto_broker.settings": "broker/coranto_broker/settings.py",
    "coranto_consumers.runtime.settings": "consumers/coranto_consumers/runtime/settings.py",
}
"""The modules with the settings of brokers and of consumers, and their files."""


def table(module: str) -> str:
    """Return the Markdown table of a module's settings: all members' settings, then its own."""
    fields = _fields(MEMBER) | _fields(SETTINGS[module])
    rows = [f"| `{name}` | {f'`{default}`' if default else ''} | {text} |" for name, (default, text) in fields.items()]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows])


def _fields(path: str) -> dict[str, tuple[str, str]]:
    """Return the default and the description of each setting of the class in a file."""
    (made,) = (node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.ClassDef))
    found = {}
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            given = {each.arg: each.value for each in node.value.keywords}
            found[node.target.id] = _shown(given["default"]), ast.literal_eval(given["description"])
    return found


def _shown(default: ast.expr) -> str:
    """Return a default as it is written in a file of settings."""
    if isinstance(default, ast.Call):  # Path("…"), SecretStr("").
        return str(ast.literal_eval(default.args[0]))
    if isinstance(default, ast.Attribute):  # A member of an enumeration: Fsync.NEVER.
        return default.attr.lower()
    value = _value(default)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value if value is not None else "")


def _value(default: ast.expr) -> object:
    """Return the value of a literal, or of a product or shift of numbers: 32 << 20."""
    if not isinstance(default, ast.BinOp):
        return ast.literal_eval(default)
    apply = {ast.LShift: operator.lshift, ast.Mult: operator.mul}[type(default.op)]
    return apply(_value(default.left), _value(default.right))
