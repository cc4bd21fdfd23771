"""SQL statements with placeholders: checks of an application's statements, and substitution of values. Does no I/O.

Literals, quoted names and comments are not interpreted. If databases disagree about the end of a quoted text (a
backslash before a quote), the statement is rejected. So a quoted text cannot hide a semicolon that begins another
statement.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from coranto.errors import InvalidInput

STAGE: Final = "stage"
"""The name of the placeholder for the staged rows."""

_FIRST_WORDS: Final = ("INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "SELECT", "WITH")
_PIECES: Final = re.compile(
    r"""
      (?P<comment> --[^\r\n]* | /\*.*?\*/ )
    | (?P<literal> '(?:[^']|'')*' | (?<![\w$])\$(?P<tag>[A-Za-z_]\w*|)\$.*?\$(?P=tag)\$ )
    | (?P<name> "(?:[^"]|"")*" | `(?:[^`]|``)*` )
    | (?P<placeholder> \{[^{}]*\} )
    | (?P<stray> ['"`{}] | /\* )
    | (?P<end> ; )
    | (?P<code> [^'"`{};$/-]+ | . )
    """,
    re.DOTALL | re.VERBOSE,
)
_TARGET: Final = re.compile(
    r"\b(?:(?:INSERT|REPLACE|MERGE)\b(?:\s+(?:OR\s+\w+|IGNORE|LOW_PRIORITY|HIGH_PRIORITY|DELAYED))*\s+INTO|DELETE\s+FROM)"
    r"\s+(?:ONLY\s+)?([^\s()]+|\()|(?:\A|[()])\s*UPDATE\s+(?:OR\s+\w+\s+|ONLY\s+|IGNORE\s+|LOW_PRIORITY\s+)*([^\s()]+|\()",
    re.IGNORECASE,
)
_WRITE: Final = re.compile(r"(?:\A|[()])\s*((?:INSERT|REPLACE)\b(?!\s*\()|(?:UPDATE|DELETE)\b)", re.IGNORECASE)
_PROPER: Final = {"INSERT": "INSERT INTO", "REPLACE": "REPLACE INTO", "DELETE": "DELETE FROM", "UPDATE": "UPDATE"}
# ASCII only: databases disagree about other spaces and letters in unquoted names.
_UPDATED: Final = re.compile(r'(?:\s+(?:AS\s+)?(?:\w+|""))?\s+SET(?=\s|"")', re.IGNORECASE | re.ASCII)
_DELETED: Final = re.compile(
    r'(?:\s+(?:AS\s+)?(?:\w+|""))?(?:\s*(?:\Z|\))|\s+WHERE(?=[\s(]|""))', re.IGNORECASE | re.ASCII
)
_INTO: Final = re.compile(r"\bINTO\b", re.IGNORECASE)
_UNNAMED_ROWS: Final = re.compile(r"\{stage\}(?!\s+AS\s+[A-Za-z_]\w*)", re.IGNORECASE)


def require_statement(text: str, tables: Collection[str], *, reserved: Collection[str], field: str) -> None:
    """Raise InvalidInput, with `field`, unless a text is one permitted statement with known placeholders.

    The placeholders are `{stage}` and the names in `tables`. Names in `reserved` must not occur.
    """

    def refuse(what: str) -> InvalidInput:
        return InvalidInput(what, field=field)

    code, unnamed, ended = "", "", False  # `unnamed` has no quoted names, which may contain keywords.
    for kind, piece in pieces(text):
        if kind == "comment":
            if piece.startswith(("/*!", "/*M!")):
                raise refuse("has a comment /*!, which MariaDB and MySQL run: write its content without the comment")
            code, unnamed = code + " ", unnamed + " "
            continue
        if ended and piece.strip():
            raise refuse("has more than one statement: give each as a text of its own")
        if kind == "stray":
            raise refuse(f"has {piece} without its other end")
        quote = {"literal": "'", "name": '"'}.get(kind, "")
        if quote and f"\\{quote}" in piece:
            raise refuse(
                f"has a backslash before a quote, which databases understand differently: write {quote * 2} for a quote"
            )
        if kind == "name" and any(f"{{{name}}}" in piece for name in (STAGE, *tables)):
            raise refuse(f"quotes the placeholder {piece}: leave the quotes out, names are quoted where that is needed")
        if kind == "placeholder" and piece[1:-1] not in (STAGE, *tables):
            known = ", ".join(f"{{{name}}}" for name in (STAGE, *sorted(tables)))
            raise refuse(f"has the placeholder {piece}, and there are {known}: give the table, or correct the name")
        ended = ended or kind == "end"
        piece = "''" if kind == "literal" else "" if kind == "end" else piece
        code, unnamed = code + piece, unnamed + ('""' if kind == "name" else piece)
    _require_kind(code, refuse_with=field)
    if used := sorted(name for name in reserved if name.lower() in code.lower()):
        raise refuse(f"names {used[0]}, which only the consumer itself may use: leave it out")
    for found in itertools.chain(_TARGET.finditer(code), _TARGET.finditer(unnamed)):
        target = found[1] or found[2]
        if not target.startswith("{") or target.startswith(f"{{{STAGE}}}"):
            shown = "its own rows" if target.startswith("{") else target.split("(")[0]
            raise refuse(f"writes to {shown}: add the table that it writes to, and write its name as {{name}}")
    for found in _TARGET.finditer(unnamed):
        behind = unnamed[unnamed.index("}", found.end() - len(found[1] or found[2])) + 1 :]
        # With more than one name here, MariaDB and MySQL would write to other tables, too.
        if found[2] and not _UPDATED.match(behind):
            raise refuse(
                f"has {_shown(behind)} after UPDATE {{name}}, where only AS alias and SET are allowed: take rows from "
                "(SELECT … FROM …) after SET and WHERE, and give a statement for each table"
            )
        if found[0][:6].upper() == "DELETE" and not _DELETED.match(behind):
            raise refuse(
                f"has {_shown(behind)} after DELETE FROM {{name}}, where only AS alias and WHERE are allowed: write "
                "WHERE EXISTS (SELECT … FROM …) for USING, and give a statement for each table"
            )
    rest = _TARGET.sub(" ", unnamed)
    if _INTO.search(rest):  # Such as SELECT … INTO, which creates a table or a file.
        raise refuse("has an INTO that is none of INSERT, REPLACE and MERGE INTO {name}: write one of these")
    if verb := _WRITE.search(rest):  # Such as INSERT without INTO, which MariaDB and MySQL accept.
        word = verb[1].upper()
        raise refuse(f"has {word} without a plain target after it: write {_PROPER[word]} {{name}}")
    if _UNNAMED_ROWS.search(code):
        raise refuse("has {stage} without a name: write {stage} AS s, say")


def _shown(code: str) -> str:
    """Return the beginning of `code`, for an error."""
    return repr(" ".join(code.split())[:40]) if code.strip() else "nothing"


def _require_kind(code: str, *, refuse_with: str) -> None:
    found = re.match(r"[\s(]*(\w*)", code)
    word = found[1].upper() if found else ""
    if word in _FIRST_WORDS:
        return
    what = f"begins with {word}" if word else "is empty"
    raise InvalidInput(
        f"{what}, and may be {', '.join(_FIRST_WORDS[:-1])} or {_FIRST_WORDS[-1]}: the consumer begins and commits the "
        "transaction, and creates the tables before it",
        field=refuse_with,
    )


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a statement that `require_statement` accepts, with its placeholders filled in, and without a semicolon."""
    return "".join(
        values[piece[1:-1]] if kind == "placeholder" else "" if kind == "end" else piece for kind, piece in pieces(text)
    )


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens of a statement, each with its kind: `comment`, `literal`, `name`, `placeholder` and so on."""
    for found in _PIECES.finditer(text):
        kind = next(
            name for name in ("comment", "literal", "name", "placeholder", "stray", "end", "code") if found[name]
        )
        yield kind, found[0]
