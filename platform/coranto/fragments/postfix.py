"""Path postfix templates: part of a fragment's path in its store, made from the fragment itself.

A spec's `path_postfix_template` is usually a date partition::

    date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}/hour={{ .Spool.FirstAppendTime.Format "15" }}

Gazette evaluates templates with Go's text/template. Coranto implements the subset that paths need: references, their
methods, `printf`, `print`, `|`, parentheses, comments and `{{-`/`-}}`. A template that uses anything else (`if`,
`range`, variables, other functions) is refused when its spec is validated, never later.

Everyone who may apply a spec can write a template, so parsing must take linear time: it scans the text once, without
backtracking. MAX_TEMPLATE_BYTES, MAX_DEPTH and MAX_WIDTH limit the work of one template.

=============================================  ==========================================================
reference                                      value
=============================================  ==========================================================
`.Spool.FirstAppendTime`                       time of the fragment's first append, UTC; has the methods Format
                                               "layout", UTC, Year, Month, Day, Hour, Minute, Second, YearDay,
                                               Weekday, Unix
`.Spool.Registers`                             the journal's registers; ValueOf "name"
`.Spool.Journal` `.Begin` `.End`               of the fragment; also `.ContentLength`
`.JournalSpec.LabelSet`, or `.LabelSet`        the journal's labels; ValueOf "name"
`.JournalSpec.Name`, or `.Name`                the journal's name; also `.Replication`, `.MaxAppendRate`
=============================================  ==========================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.fragments.go_time import day_of_year, format_time, month_name, weekday_name
from coranto.names import MAX_JOURNAL_BYTES, validate_path
from coranto.wire import protocol_pb2 as pb

MAX_TEMPLATE_BYTES: Final = 4096
"""The longest template, in bytes of UTF-8. A postfix has at most 512 bytes."""
MAX_DEPTH: Final = 16
"""The deepest nesting of parentheses."""
MAX_WIDTH: Final = 64
"""The largest width of a printf verb."""
_MAX_INTEGER_DIGITS: Final = 18

_FIELD = "path_postfix_template"


class PostfixTemplate:
    """A parsed template, tested on an empty fragment."""

    def __init__(self, text: str) -> None:
        """Raises InvalidInput when `text` isn't a template, is too long, or uses anything that is not supported."""
        self.text = text
        if len(text.encode()) > MAX_TEMPLATE_BYTES:
            raise InvalidInput(
                f"the template {text[:60]!r}… has {len(text.encode())} bytes; it may have {MAX_TEMPLATE_BYTES}; "
                "shorten it",
                field=_FIELD,
            )
        try:
            self._parts = _parse(text)
            nothing = Fragment("", 0, 0, ZERO_SUM, Codec.NONE)
            self._render(_names(nothing, datetime(1, 1, 1, tzinfo=UTC), pb.LabelSet(), pb.JournalSpec()))
        except _TemplateError as err:
            raise InvalidInput(f"{err} in the template {text!r}", field=_FIELD) from None

    def render(self, fragment: Fragment, first_append_time: float, registers: pb.LabelSet, spec: pb.JournalSpec) -> str:
        """Return the postfix of a fragment: empty, or a clean relative path.

        `first_append_time` is in Unix seconds. Raises InvalidInput when the result isn't such a path.
        """
        at = datetime.fromtimestamp(first_append_time, tz=UTC)
        try:
            result = self._render(_names(fragment, at, registers, spec))
        except _TemplateError as err:
            raise InvalidInput(f"{err} in the template {self.text!r}", field=_FIELD) from None
        return validate_path("path_postfix", result, 1, MAX_JOURNAL_BYTES, allow_empty=True)

    def _render(self, names: _Names) -> str:
        return "".join(part if isinstance(part, str) else _text(part.value(names)) for part in self._parts)


class _TemplateError(Exception):
    """A problem in a template. The caller adds the template's text."""


# -------------------------------------------------------------------------------------------------------- references


class _Named(int):
    """A number that prints as its name: a month or a weekday."""

    def __new__(cls, value: int, name: str) -> _Named:
        self = super().__new__(cls, value)
        self._name = name
        return self

    def __str__(self) -> str:
        return self._name

    _name: str


@dataclass(frozen=True, slots=True)
class _Method:
    """A method, and its number of arguments, which are texts."""

    arguments: int
    call: Callable[..., _Value]


_Names = Mapping[str, "_Value"]
_Value = str | int | _Method | _Names


def _names(fragment: Fragment, at: datetime, registers: pb.LabelSet, spec: pb.JournalSpec) -> _Names:
    of_spec: _Names = {
        "Name": spec.name,
        "Replication": spec.replication,
        "MaxAppendRate": spec.max_append_rate,
        "LabelSet": _label_names(spec.labels),
    }
    of_spool: _Names = {
        "FirstAppendTime": _time_names(at),
        "Registers": _label_names(registers),
        "Journal": fragment.journal,
        "Begin": fragment.begin,
        "End": fragment.end,
        "ContentLength": fragment.length,
    }
    return {"Spool": of_spool, "JournalSpec": of_spec, **of_spec}


def _label_names(found: pb.LabelSet) -> _Names:
    return {"ValueOf": _Method(1, lambda name: labels.value_of(found, name))}


def _time_names(at: datetime) -> _Names:
    return {
        "Format": _Method(1, lambda layout: format_time(layout, at)),
        "UTC": _Method(0, lambda: _time_names(at)),
        "Year": at.year,
        "Month": _Named(at.month, month_name(at)),
        "Day": at.day,
        "Hour": at.hour,
        "Minute": at.minute,
        "Second": at.second,
        "YearDay": day_of_year(at),
        "Weekday": _Named((at.weekday() + 1) % 7, weekday_name(at)),
        "Unix": int((at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()),
    }


def _text(value: _Value) -> str:
    if isinstance(value, str | int):
        return str(value)
    raise _TemplateError("a reference names a structure, not a text or number; add a field or .Format to it")


# ------------------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True)
class _Literal:
    content: str | int

    def value(self, names: _Names, *last: _Value) -> _Value:
        if last:
            raise _TemplateError(f"the constant {self.content!r} takes no argument")
        return self.content


@dataclass(frozen=True, slots=True)
class _Reference:
    """A chain of fields from the root, or from the value of `of`. Only a method at the end takes arguments."""

    fields: tuple[str, ...]
    arguments: tuple[_Expression, ...] = ()
    of: _Expression | None = None

    def value(self, names: _Names, *last: _Value) -> _Value:
        found: _Value = names if self.of is None else self.of.value(names)
        given = [*(argument.value(names) for argument in self.arguments), *last]
        for index, field in enumerate(self.fields):
            path = "." + ".".join(self.fields[: index + 1])
            if not isinstance(found, Mapping) or field not in found:
                raise _TemplateError(f"{path} is not known to Coranto")
            found = found[field]
            is_last = index == len(self.fields) - 1
            if isinstance(found, _Method):
                texts = [_text(value) for value in given] if is_last else []
                if len(texts) != found.arguments:
                    raise _TemplateError(f"{path} takes {found.arguments} argument(s), not {len(texts)}")
                found = found.call(*texts)
            elif is_last and given:
                raise _TemplateError(f"{path} is not a method and takes no argument")
        return found


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `printf` or `print`."""

    function: str
    arguments: tuple[_Expression, ...]

    def value(self, names: _Names, *last: _Value) -> _Value:
        given = [*(argument.value(names) for argument in self.arguments), *last]
        texts = [_text(each) for each in given]
        if self.function == "print":
            return "".join(
                # Adjacent numbers are separated by a space.
                f" {text}" if index and not isinstance(value, str) and not isinstance(given[index - 1], str) else text
                for index, (text, value) in enumerate(zip(texts, given, strict=True))
            )
        if not given or not isinstance(given[0], str):
            raise _TemplateError("printf needs a format text first")
        return _printf(given[0], given[1:])


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """A chain of commands. Each command's value is the last argument of the next."""

    commands: tuple[_Expression, ...]

    def value(self, names: _Names, *last: _Value) -> _Value:
        for command in self.commands:
            last = (command.value(names, *last),)
        return last[0]


_Expression = _Literal | _Reference | _Call | _Pipeline


def _printf(template: str, values: Sequence[_Value]) -> str:
    remaining = list(values)
    pieces: list[str] = []
    position = 0
    while (verb := template.find("%", position)) >= 0:
        pieces.append(template[position:verb])
        flags, width, kind, position = _read_verb(template, verb + 1)
        if kind == "%" and position == verb + 2:
            pieces.append("%")
        elif not ("a" <= kind.lower() <= "z"):  # Not a verb: the % is plain text.
            position = verb + 1
            pieces.append("%")
        elif not remaining:
            raise _TemplateError(f"printf {template!r} has more verbs than values")
        else:
            pieces.append(_write_value(template, flags, width, kind, remaining.pop(0)))
    if remaining:
        raise _TemplateError(f"printf {template!r} has fewer verbs than values")
    return "".join((*pieces, template[position:]))


def _read_verb(template: str, position: int) -> tuple[str, str, str, int]:
    """Return the flags, width, letter and end of the verb whose % is just before `position`."""
    begin = position
    while position < len(template) and template[position] in "-0":
        position += 1
    middle = position
    while position < len(template) and template[position] in "0123456789":
        position += 1
    return template[begin:middle], template[middle:position], template[position : position + 1], position + 1


def _write_value(template: str, flags: str, width: str, kind: str, value: _Value) -> str:
    if len(width) > len(str(MAX_WIDTH)) or int(width or 0) > MAX_WIDTH:
        raise _TemplateError(f"printf {template!r} asks for a width above {MAX_WIDTH}")
    flags = "".join(dict.fromkeys(flags))
    if kind in "dxX" and isinstance(value, int):
        return f"%{flags}{width}{kind}" % int(value)
    if kind == "v" or (kind == "s" and isinstance(value, str | _Named)):
        return f"%{flags.replace('0', '')}{width}s" % (value,)
    raise _TemplateError(f"printf {template!r} cannot write {value!r} with %{kind}; use %s, %v, %d or %x")


# ----------------------------------------------------------------------------------------------------------- parsing

_TOKEN = re.compile(
    r"""\s*+(?:(?P<text>"(?:\\.|[^"\\\n])*+"|`[^`]*+`)|(?P<number>-?+[0-9]++)(?![0-9A-Za-z_.])"""
    r"""|(?P<chain>(?:\.[A-Za-z_][0-9A-Za-z_]*+)++)|(?P<word>[A-Za-z_][0-9A-Za-z_]*+)|(?P<mark>[|()]))"""
)
_FUNCTIONS = ("printf", "print")


def _parse(text: str) -> list[str | _Expression]:
    parts: list[str | _Expression] = []
    position, trim = 0, False
    for action in _actions(text):
        literal = text[position : action.begin]
        literal = literal.lstrip() if trim else literal
        parts.append(literal.rstrip() if action.trims_left else literal)
        if action.body:
            parts.append(_Parser(action.body).pipeline(until=""))
        position, trim = action.end, action.trims_right
    rest = text[position:]
    parts.append(rest.lstrip() if trim else rest)
    return parts


@dataclass(frozen=True, slots=True)
class _Action:
    """One `{{…}}`: its place in the text, its body (empty for a comment), and if it trims spaces on either side."""

    begin: int
    end: int
    body: str
    trims_left: bool
    trims_right: bool


def _actions(text: str) -> Iterator[_Action]:
    position = 0
    while (begin := text.find("{{", position)) >= 0:
        inside = begin + 2
        trims_left = text[inside : inside + 1] == "-" and text[inside + 1 : inside + 2].isspace()
        inside += trims_left
        comment = _skip_spaces(text, inside)
        if is_comment := text.startswith("/*", comment):
            close = text.find("*/", comment + 2)
            if close < 0:
                raise _TemplateError("a comment is not closed with */")
            close += 2
        else:
            close = inside
        close = _find_close(text, close)
        trims_right = text[close] == "-"
        position = close + 2 + trims_right
        body = text[inside:close].strip()
        if is_comment:
            if not body.endswith("*/"):
                raise _TemplateError(f"a comment must be alone in its action, and {body[-20:]!r} is not")
            body = ""
        elif not body:
            raise _TemplateError("a value is missing in {{}}")
        yield _Action(begin, position, body, trims_left, trims_right)


def _find_close(text: str, position: int) -> int:
    """Return the position of the `}}` or ` -}}` that closes an action, outside of quotes."""
    while position < len(text):
        char = text[position]
        if text.startswith("}}", position):
            return position
        if char == "-" and text.startswith("-}}", position) and text[position - 1].isspace():
            return position
        position = _end_of_quote(text, position) if char in '"`' else position + 1
    raise _TemplateError("an action is not closed with }}")


def _end_of_quote(text: str, position: int) -> int:
    """Return the end of the quoted text that begins at `position`."""
    quote = text[position]
    position += 1
    while position < len(text) and text[position] != quote:
        position += 2 if quote == '"' and text[position] == "\\" else 1
    if position >= len(text):
        raise _TemplateError(f"a quoted text is not closed with {quote}")
    return position + 1


def _skip_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


class _Parser:
    """Parses one action's expression, token by token."""

    def __init__(self, body: str) -> None:
        self._body = body
        self._position = 0

    def pipeline(self, until: str, depth: int = 0) -> _Expression:
        """Parse commands up to the mark `until`, and consume the mark. The empty mark means the end."""
        if depth > MAX_DEPTH:
            raise _TemplateError(f"parentheses are nested deeper than {MAX_DEPTH}")
        commands: list[_Expression] = []
        arguments: list[_Expression] = []
        while True:
            kind, token = self._next()
            if kind in ("mark", "end") and token in ("|", until):
                if not arguments:
                    raise _TemplateError(f"a value is missing in {{{{{self._body}}}}}")
                commands.append(_command(arguments, first=not commands))
                arguments = []
                if token == until:
                    return commands[0] if len(commands) == 1 else _Pipeline(tuple(commands))
            elif token == "(":
                arguments.append(self.pipeline(until=")", depth=depth + 1))
            elif kind == "text":
                arguments.append(_Literal(_unquote(token)))
            elif kind == "number":
                arguments.append(_Literal(_integer(token)))
            elif kind == "chain":
                fields = tuple(token[1:].split("."))
                # In `(…).Field`, without a space, the field belongs to the group.
                of = arguments.pop() if arguments and self._touches_group(token) else None
                arguments.append(_Reference(fields, of=of))
            elif kind == "word" and token in _FUNCTIONS and not arguments:
                arguments.append(_Call(token, ()))
            else:
                raise _TemplateError(
                    f"{token or 'the end'!r} is not supported in {{{{{self._body}}}}}; "
                    "use references such as .Spool.FirstAppendTime.Format, printf, print and |"
                )

    def _next(self) -> tuple[str, str]:
        found = _TOKEN.match(self._body, self._position)
        if found is None:
            rest = self._body[self._position :].strip()
            return ("end", "") if not rest else ("unknown", rest)
        self._position = found.end()
        kind = found.lastgroup or ""
        return kind, found[kind]

    def _touches_group(self, token: str) -> bool:
        return self._body.endswith(")", 0, self._position - len(token))


def _command(arguments: list[_Expression], *, first: bool) -> _Expression:
    head, rest = arguments[0], tuple(arguments[1:])
    if isinstance(head, _Call) and not head.arguments:
        return _Call(head.function, rest)
    if isinstance(head, _Reference) and not head.arguments:
        return _Reference(head.fields, rest, head.of)
    if rest or not first:
        raise _TemplateError("a constant or group cannot be given arguments")
    return head


def _integer(token: str) -> int:
    if len(token.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise _TemplateError(f"the number {token[:20]}… has more than {_MAX_INTEGER_DIGITS} digits")
    return int(token)


def _unquote(token: str) -> str:
    if token.startswith("`"):
        return token[1:-1]
    try:
        value = json.loads(token)
    except ValueError as err:
        raise _TemplateError(f"{token} is not a quoted text") from err
    return str(value)
