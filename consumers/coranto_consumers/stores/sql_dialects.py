"""Checks of an application's statements in the SQL dialect of one database. Ambiguous statements are rejected.

`sql_text` splits a statement into tokens in the same way for all databases. Databases disagree about some tokens, such
as nested comments. If the store's database may split a statement differently, the statement is rejected. Then a parser
of the dialect finds the tables that the statement writes to. Statements that it cannot parse are rejected.

This guards against mistakes of the application's author, not against attackers: the database itself enforces the
permissions of its roles.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection
from typing import Any, Final

from coranto.errors import InvalidInput
from coranto.extras import with_install_advice
from coranto_consumers.stores.sql_text import STAGE, filled, pieces

_PARSERS: Final = {"sqlite": "sqlite", "postgresql": "postgres", "mysql": "mysql"}
_MODIFIERS: Final = re.compile(
    r"\b(INSERT|REPLACE|UPDATE|DELETE)(?:\s+(?:OR\s+\w+|IGNORE|LOW_PRIORITY|HIGH_PRIORITY|DELAYED|QUICK)\b)+",
    re.IGNORECASE,
)
_REPLACE: Final = re.compile(r"\bREPLACE(?=\s+INTO\b)", re.IGNORECASE)
_LONE_RETURN: Final = re.compile(r"\r(?!\n)")


def require_dialect(text: str, dialect: str, tables: Collection[str], *, field: str) -> None:
    """Raise InvalidInput, with `field`, for a statement that a dialect rejects, or may parse differently.

    `text` has passed `require_statement`. `tables` are the placeholders of the tables that it may write to.
    """
    _require_pieces(text, dialect, field)
    mark = f"coranto_{uuid.uuid4().hex}"
    names = {name: f"{mark}_{number}" for number, name in enumerate(sorted(tables))}
    root = _parsed(_for_parser(text, names, mark), dialect, field)
    from sqlglot import exp

    if not isinstance(root, exp.Insert | exp.Update | exp.Delete | exp.Merge | exp.Query):
        raise InvalidInput(f"is a statement of another kind ({type(root).__name__.upper()})", field=field)
    for node in root.walk():
        if isinstance(node, exp.Into):
            raise InvalidInput("has SELECT … INTO, which makes a table: write INSERT INTO {name} SELECT …", field=field)
        if isinstance(node, exp.Delete) and (node.args.get("tables") or node.args.get("using")):
            raise InvalidInput("deletes from several tables: write DELETE FROM {name} WHERE …", field=field)
        if isinstance(node, exp.Insert | exp.Update | exp.Delete | exp.Merge) and not isinstance(node.parent, exp.When):
            target = node.this.this if isinstance(node.this, exp.Schema) else node.this
            plain = isinstance(target, exp.Table) and target.name in names.values() and not target.db
            if not plain or (isinstance(node, exp.Update) and target.args.get("joins")):
                raise InvalidInput(
                    f"has {type(node).__name__.upper()} with another target than one of its tables: add the table that "
                    "it writes to, and write its name as {name}",
                    field=field,
                )


def _require_pieces(text: str, dialect: str, field: str) -> None:
    """Raise InvalidInput for syntax that this database splits into other tokens."""

    def refuse(what: str) -> InvalidInput:
        return InvalidInput(what, field=field)

    if _LONE_RETURN.search(text):
        raise refuse("has a carriage return without a newline, which ends a comment in some databases: leave it out")
    for kind, piece in pieces(text):
        if kind == "comment" and "/*" in piece[2:]:
            raise refuse("has /* within a comment, which databases understand differently: leave it out")
        if kind == "comment" and dialect == "mysql" and re.match(r"--[^\s]", piece):
            raise refuse("has -- without a space after it, which is not a comment here: write a space")
        if kind == "literal" and piece[0] == "$" and dialect != "postgresql":
            raise refuse("has a text in dollar signs, which this database does not know: write it in quotes")
        if kind == "name" and piece[0] == "`" and dialect == "postgresql":
            raise refuse('has a name in backticks, which this database does not know: write "name"')
        if kind == "code" and dialect == "mysql" and "#" in piece:
            raise refuse("has #, which begins a comment here: write -- and a space for a comment")
        if kind == "code" and dialect == "sqlite" and "[" in piece:
            raise refuse('has [, which begins a name here: write "name"')


def _for_parser(text: str, names: dict[str, str], rows: str) -> str:
    """Return a statement with plain names instead of placeholders, and without keywords that the parser lacks."""
    values = {**names, STAGE: f"(SELECT 1 FROM {rows})"}
    code = filled(text, values)
    return _REPLACE.sub("INSERT", _MODIFIERS.sub(r"\1", code))


def _parsed(code: str, dialect: str, field: str) -> Any:
    try:
        import sqlglot
        from sqlglot.errors import SqlglotError
    except ModuleNotFoundError as error:
        raise with_install_advice(error) from error

    logger = logging.getLogger("sqlglot")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # It warns about unparsed text, which is an error here.
    try:
        found = [each for each in sqlglot.parse(code, dialect=_PARSERS[dialect]) if each is not None]
    except (SqlglotError, RecursionError) as error:
        raise InvalidInput(
            f"is not understood as {dialect}, so the tables that it writes to are unknown: write it more simply, in "
            "several statements",
            field=field,
        ) from error
    finally:
        logger.setLevel(level)
    if len(found) != 1:
        raise InvalidInput(f"has {len(found)} statements: give each as a text of its own", field=field)
    return found[0]
