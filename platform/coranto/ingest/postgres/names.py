"""Names of tables: in statements, and in splits and events."""

from __future__ import annotations


def quoted(*names: str) -> str:
    """Return a name for a statement, with its parts quoted where necessary."""
    return ".".join(name if _is_plain(name) else _in_quotes(name) for name in names)


def table_name(schema: str, table: str) -> str:
    """Return the unique name of a table in splits and events."""
    return ".".join(_in_quotes(name) if "." in name or '"' in name else name for name in (schema, table))


def _is_plain(name: str) -> bool:
    return name.isascii() and name.replace("_", "a").isalnum() and name == name.lower() and not name[:1].isdigit()


def _in_quotes(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
