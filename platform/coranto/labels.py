"""Labels, label sets, and selectors that match label sets.

Values are Protobuf messages. A `LabelSet` is sorted and unique on (name, value). A name may have several values, but
not an empty one together with others. A `LabelSelector` matches a set when none of its excludes match and, for
every label name it includes, at least one value matches. An empty selector value matches any value of that label. With
`prefix`, the selector's value has to match only the beginning of the label's value.

Functions do not change their arguments; they return new messages.

Selectors as text are comma-separated expressions::

    name = value   name == value   name != value   name   !name
    name in (a, b)   name notin (a, b)   name not in (a, b)

A name may end in `:prefix`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final

from coranto.errors import InvalidInput
from coranto.names import PATH_SYMBOLS, validate_token
from coranto.wire import protocol_pb2 as pb

CONTENT_TYPE: Final = "content-type"
"""The media type of a journal's messages. It determines their framing."""
INSTANCE: Final = "app.gazette.dev/instance"
MANAGED_BY: Final = "app.gazette.dev/managed-by"
MESSAGE_TYPE: Final = "app.gazette.dev/message-type"
MESSAGE_SUBTYPE: Final = "app.gazette.dev/message-subtype"
REGION: Final = "app.gazette.dev/region"
TAG: Final = "app.gazette.dev/tag"
"""A label that may have several values, unlike the others here."""
NAME: Final = "name"
"""Meta label: the journal's name. It is never stored, and selectors can always use it."""
PREFIX: Final = "prefix"
"""Old meta label: a folder of journals. `rewrite_legacy_prefix` turns it into `name:prefix`."""
ID: Final = "id"
"""Meta label of shards."""
DATA_LOSS: Final = "coranto.dev/data-loss"
"""With the value CONTINUE, a shard continues after lost content of a source. Without this label, it fails."""
CONTINUE: Final = "continue"
SAME_CONTENT: Final = "coranto.dev/same-content"
"""On a shard: `<id>/<journal>`, a recreated source that has the content of the earlier journal in the shard's
checkpoint. It may have several values. The id alone is not enough: journals that one change has created share it."""
HELD: Final = "coranto.dev/held"
"""A register. Empty registers satisfy every check, except one that includes this register."""
STREAM: Final = "coranto.dev/stream"
"""The stream of a segment."""
STREAM_PART: Final = "coranto.dev/stream-part"
"""The stream of a journal that belongs to a stream but is not a segment."""
PUBLICATIONS: Final = "coranto.dev/publications"
"""The value of MANAGED_BY of ledgers of publications."""
MESSAGE_TYPES: Final = "coranto.dev/message-types"
"""The value of MANAGED_BY of registries of message types."""
OF_RECORDS: Final = frozenset({PUBLICATIONS, MESSAGE_TYPES})
"""The values of MANAGED_BY of journals whose programs need every record."""
FORKS: Final = "coranto.dev/fork-"
"""The beginning of the names of the labels below, which connect forks and their sources."""
FORK_OF: Final = f"{FORKS}of"
"""The journal that a fork was created from."""
FORK_OFFSET: Final = f"{FORKS}offset"
"""The offset where a fork diverges."""
FORK_BEGIN: Final = f"{FORKS}begin"
"""The first offset that a fork shares."""
FORK_SHARES: Final = f"{FORKS}shares"
"""`<end>/<journal>`: a fork has the fragments of that journal up to `end`. It may have several values."""
FORK_HOLD: Final = f"{FORKS}hold"
"""`<begin>/<fork>`: the journal keeps its content from `begin` on for that fork. It may have several values."""
FORK_STATE: Final = f"{FORKS}state"
"""FORMING until a fork has all of its initial content. Then the label is removed."""
FORMING: Final = "forming"
LINES: Final = "coranto.dev/lines"
"""WHOLE if each append to the journal must end with a newline, otherwise ANY. By default, `content-type` decides."""
WHOLE: Final = "whole"
ANY: Final = "any"
SINGLE_VALUED: Final = frozenset({CONTENT_TYPE, INSTANCE, LINES, MANAGED_BY, MESSAGE_TYPE, MESSAGE_SUBTYPE, REGION})

JSON_LINES: Final = "application/x-ndjson"
FIXED_FRAMES: Final = "application/x-protobuf-fixed"
CSV: Final = "text/csv"
RECOVERY_LOG: Final = "application/x-gazette-recoverylog"
LINE_TYPES: Final = frozenset({JSON_LINES, CSV})
"""The content types of journals of lines."""

MIN_NAME_BYTES: Final = 2
MAX_NAME_BYTES: Final = 64
MAX_VALUE_BYTES: Final = 1024

_PLAIN_NAME: Final = re.compile(rf"[0-9A-Za-z\-_+/.]{{{MIN_NAME_BYTES},{MAX_NAME_BYTES}}}").fullmatch
_PLAIN_VALUE: Final = re.compile(rf"[0-9A-Za-z\-_+/.=%]{{0,{MAX_VALUE_BYTES}}}").fullmatch

_PREFIX_SUFFIX = ":prefix"
_MEDIA_TYPE = re.compile(r"[0-9A-Za-z\-_+.%]+(/[0-9A-Za-z\-_+.%]+)?")

Pairs = Mapping[str, str] | Iterable[tuple[str, str]]


# ---------------------------------------------------------------------------------------------------- building


def label_set(pairs: Pairs = (), /, **named: str) -> pb.LabelSet:
    """Return a valid label set from a mapping, pairs (a name may repeat) or keywords. Raises InvalidInput."""
    items = [*(pairs.items() if isinstance(pairs, Mapping) else pairs), *named.items()]
    result = _from_labels(pb.Label(name=name, value=value) for name, value in items)
    validate_label_set(result)
    return result


def label_selector(*, include: Pairs = (), exclude: Pairs = ()) -> pb.LabelSelector:
    """Return a valid selector. A name that ends in `:prefix` matches prefixes of values. Raises InvalidInput."""
    result = pb.LabelSelector(include=_selector_side(include), exclude=_selector_side(exclude))
    validate_selector(result)
    return result


def _selector_side(pairs: Pairs) -> pb.LabelSet:
    return _from_labels(_selector_label(*pair) for pair in (pairs.items() if isinstance(pairs, Mapping) else pairs))


def _selector_label(name: str, value: str) -> pb.Label:
    bare = name.removesuffix(_PREFIX_SUFFIX)
    return pb.Label(name=bare, value=value, prefix=bare != name)


def _from_labels(labels: Iterable[pb.Label]) -> pb.LabelSet:
    unique = {(label.name, label.value, label.prefix): label for label in labels}
    return pb.LabelSet(labels=[unique[key] for key in sorted(unique)])


def values_of(labels: pb.LabelSet, name: str) -> tuple[str, ...]:
    """Return all values of a label, sorted; empty when the set doesn't have it."""
    return tuple(label.value for label in labels.labels if label.name == name)


def value_of(labels: pb.LabelSet, name: str, default: str = "") -> str:
    """Return the first value of a label, or `default` when the set doesn't have it."""
    return next((label.value for label in labels.labels if label.name == name), default)


def takes_whole_lines(labels: pb.LabelSet) -> bool:
    """Return True if each append with content to a journal with these labels has to end with a newline."""
    chosen = value_of(labels, LINES)
    return chosen == WHOLE or (chosen != ANY and value_of(labels, CONTENT_TYPE) in LINE_TYPES)


def as_pairs(labels: pb.LabelSet) -> tuple[tuple[str, str], ...]:
    """Return the set as (name, value) pairs in its order."""
    return tuple((label.name, label.value) for label in labels.labels)


def with_value(labels: pb.LabelSet, name: str, value: str) -> pb.LabelSet:
    """Return the set with `value` as the only value of a label."""
    return _from_labels([*without(labels, name).labels, pb.Label(name=name, value=value)])


def add_value(labels: pb.LabelSet, name: str, value: str) -> pb.LabelSet:
    """Return the set with `value` in addition to the other values of a label."""
    return _from_labels([*labels.labels, pb.Label(name=name, value=value)])


def without(labels: pb.LabelSet, name: str) -> pb.LabelSet:
    """Return the set without a label."""
    return pb.LabelSet(labels=[label for label in labels.labels if label.name != name])


def with_meta(name: str, labels: pb.LabelSet) -> pb.LabelSet:
    """Return a journal's labels as selectors see them: with the meta label `name`."""
    return _from_labels([pb.Label(name=NAME, value=name), *(label for label in labels.labels if label.name != NAME)])


# -------------------------------------------------------------------------------------------------- validating


def validate_label_set(labels: pb.LabelSet, *, allow_prefix: bool = False) -> None:
    """Check names, values, order and uniqueness. `prefix` is allowed in selectors only. Raises InvalidInput."""
    if _is_plainly_valid(labels, allow_prefix):
        return
    previous: pb.Label | None = None
    for index, label in enumerate(labels.labels):
        try:
            validate_token("name", label.name, MIN_NAME_BYTES, MAX_NAME_BYTES)
            validate_token("value", label.value, 0, MAX_VALUE_BYTES, symbols=PATH_SYMBOLS)
            if label.prefix and not allow_prefix:
                raise InvalidInput(
                    "a prefix is only allowed in a selector; give the label a whole value", field="prefix"
                )
            if previous is not None:
                _validate_order(previous, label)
        except InvalidInput as err:
            raise err.within(f"labels[{index}]") from None
        previous = label


def _is_plainly_valid(labels: pb.LabelSet, allow_prefix: bool) -> bool:
    """Return True if the set is valid, ASCII and repeats no name: a fast path for the registers of most appends."""
    last = ""
    for label in labels.labels:
        name = label.name
        if not (last < name and _is_plain_name(name) and _PLAIN_VALUE(label.value)):
            return False
        if label.prefix and not allow_prefix:
            return False
        last = name
    return True


@lru_cache(maxsize=1024)
def _is_plain_name(name: str) -> bool:
    """Return True if a name is valid and ASCII. Cached, because the same names recur."""
    return _PLAIN_NAME(name) is not None


def _validate_order(previous: pb.Label, label: pb.Label) -> None:
    if previous.name == label.name:
        if previous.value >= label.value:
            raise InvalidInput(
                f"{label.name}={label.value} does not sort after {previous.name}={previous.value}; "
                "labels must be unique and sorted by name, then value"
            )
        if not previous.value:
            raise InvalidInput(f"{label.name} has the value {label.value!r} and an empty one; keep one of them")
    elif previous.name > label.name:
        raise InvalidInput(f"{label.name} does not sort after {previous.name}; labels must be sorted by name")


def validate_selector(selector: pb.LabelSelector) -> None:
    """Check both sides of a selector. Raises InvalidInput."""
    if not selector.exclude.labels and _is_plainly_valid(selector.include, allow_prefix=True):
        return
    for side in ("include", "exclude"):
        try:
            validate_label_set(getattr(selector, side), allow_prefix=True)
        except InvalidInput as err:
            raise err.within(side) from None


def validate_journal_labels(labels: pb.LabelSet) -> None:
    """Check a journal's labels beyond their form: meta labels, single values, and media and message types.

    Raises InvalidInput.
    """
    validate_label_set(labels)
    seen: dict[str, str] = {}
    for label in labels.labels:
        if label.name in (NAME, PREFIX):
            raise InvalidInput(f"the label {label.name!r} is implied by the journal's name; remove it")
        if label.name in SINGLE_VALUED and label.name in seen:
            raise InvalidInput(
                f"{label.name} has the values {seen[label.name]!r} and {label.value!r}, but may have only one; "
                "keep one of them"
            )
        seen[label.name] = label.value
    if CONTENT_TYPE in seen and not _MEDIA_TYPE.fullmatch(seen[CONTENT_TYPE]):
        raise InvalidInput(f"{CONTENT_TYPE}={seen[CONTENT_TYPE]} is not a media type such as {JSON_LINES}")
    if seen.get(LINES, ANY) not in (WHOLE, ANY):
        raise InvalidInput(f"{LINES}={seen[LINES]} is not one of {WHOLE}, {ANY}")
    if MESSAGE_TYPE in seen and CONTENT_TYPE not in seen:
        raise InvalidInput(f"{MESSAGE_TYPE} also needs the label {CONTENT_TYPE}; add that")
    if MESSAGE_SUBTYPE in seen and MESSAGE_TYPE not in seen:
        raise InvalidInput(f"{MESSAGE_SUBTYPE} also needs the label {MESSAGE_TYPE}; add that")


# ----------------------------------------------------------------------------------------------------- algebra


def _by_name(labels: pb.LabelSet) -> dict[str, list[pb.Label]]:
    result: dict[str, list[pb.Label]] = {}
    for label in labels.labels:
        result.setdefault(label.name, []).append(label)
    return result


def union(left: pb.LabelSet, right: pb.LabelSet) -> pb.LabelSet:
    """Return the labels of both sets. For a name that both have, only the values of `left` are kept."""
    replaced = _replaced(left, right)
    if replaced is not None:
        return replaced
    merged = _by_name(right) | _by_name(left)
    return pb.LabelSet(labels=[label for name in sorted(merged) for label in merged[name]])


def _replaced(left: pb.LabelSet, right: pb.LabelSet) -> pb.LabelSet | None:
    """Return the union if `left` is a single label that replaces the single value of `right`, else None."""
    labels, present = left.labels, right.labels
    if len(labels) != 1:
        return None
    new = labels[0]
    wanted, place = new.name, -1
    for label in present:
        place += 1
        name = label.name
        if name >= wanted:
            break
    else:
        return None
    if name != wanted or (place + 1 < len(present) and present[place + 1].name == wanted):
        return None  # The name is new, or has several values.
    result = pb.LabelSet()
    result.CopyFrom(right)
    result.labels[place].CopyFrom(new)
    return result


def intersect(left: pb.LabelSet, right: pb.LabelSet) -> pb.LabelSet:
    """Return the labels of those names whose values are the same in both sets."""
    theirs = _by_name(right)
    return pb.LabelSet(
        labels=[label for name, mine in _by_name(left).items() if _same(mine, theirs.get(name)) for label in mine]
    )


def subtract(left: pb.LabelSet, right: pb.LabelSet) -> pb.LabelSet:
    """Return the labels of `left`, except names whose values are the same in both sets."""
    theirs = _by_name(right)
    return pb.LabelSet(
        labels=[label for name, mine in _by_name(left).items() if not _same(mine, theirs.get(name)) for label in mine]
    )


def _same(left: list[pb.Label], right: list[pb.Label] | None) -> bool:
    return right is not None and [label.value for label in left] == [label.value for label in right]


# --------------------------------------------------------------------------------------------------- selecting


def matches(selector: pb.LabelSelector, labels: pb.LabelSet) -> bool:
    """Return True if the selector matches the set. An empty selector matches every set."""
    excluded = selector.exclude.labels
    if not excluded and _has_all(selector.include, labels):
        return True
    present: dict[str, list[str]] = {}
    for label in labels.labels:
        present.setdefault(label.name, []).append(label.value)
    if any(_label_matches(label, present) for label in excluded):
        return False
    verdicts: dict[str, bool] = {}
    for label in selector.include.labels:
        if not verdicts.get(label.name, False):
            verdicts[label.name] = _label_matches(label, present)
    return all(verdicts.values())


def _has_all(wanted: pb.LabelSet, labels: pb.LabelSet) -> bool:
    """Return True if the set has each wanted label literally and in order, which is sufficient for a match."""
    present = iter(labels.labels)
    for label in wanted.labels:
        name, value = label.name, label.value
        for each in present:
            if each.name == name and (not value or each.value == value):
                break
        else:
            return False
    return True


def matcher(selector: pb.LabelSelector) -> Callable[[pb.LabelSet], bool]:
    """Return `matches` for one selector and many sets. The selector, which may be long, is prepared only once."""
    include, exclude = _accepted_values(selector.include), _accepted_values(selector.exclude)

    def match(labels: pb.LabelSet) -> bool:
        found: set[str] = set()
        for label in labels.labels:
            accepted = exclude.get(label.name)
            if accepted is not None and accepted.accepts(label.value):
                return False
            accepted = include.get(label.name)
            if accepted is not None and accepted.accepts(label.value):
                found.add(label.name)
        return len(found) == len(include)

    return match


class _AcceptedValues:
    """The values of one label name that a selector accepts."""

    def __init__(self) -> None:
        self.any = False
        self.values: set[str] = set()
        self.prefixes: tuple[str, ...] = ()

    def accepts(self, value: str) -> bool:
        return self.any or value in self.values or value.startswith(self.prefixes)


def _accepted_values(side: pb.LabelSet) -> dict[str, _AcceptedValues]:
    result: dict[str, _AcceptedValues] = {}
    prefixes: dict[str, list[str]] = {}
    for label in side.labels:
        accepted = result.setdefault(label.name, _AcceptedValues())
        if not label.value:
            accepted.any = True
        elif label.prefix:
            prefixes.setdefault(label.name, []).append(label.value)
        else:
            accepted.values.add(label.value)
    for name, values in prefixes.items():
        result[name].prefixes = tuple(values)
    return result


def _label_matches(wanted: pb.Label, present: Mapping[str, list[str]]) -> bool:
    values = present.get(wanted.name)
    if not values:
        return False
    if not wanted.value:
        return True
    if wanted.prefix:
        return any(value.startswith(wanted.value) for value in values)
    return wanted.value in values


def rewrite_legacy_prefix(selector: pb.LabelSelector) -> pb.LabelSelector:
    """Return the selector with the old `prefix=folder/` turned into `name:prefix=folder/`.

    Raises InvalidInput when such a value doesn't end in `/`.
    """
    result = pb.LabelSelector()
    for side in ("include", "exclude"):
        getattr(result, side).CopyFrom(_from_labels(map(_without_legacy_prefix, getattr(selector, side).labels)))
    return result


def _without_legacy_prefix(label: pb.Label) -> pb.Label:
    if label.name != PREFIX:
        return label
    if not label.value.endswith("/"):
        raise InvalidInput(
            f"the selector prefix={label.value} must end in '/'; use name:prefix={label.value} for any prefix",
            field="selector",
        )
    return pb.Label(name=NAME, value=label.value, prefix=True)


# A name or value ends at the first character that cannot be part of it. `validate_token` then reports the exact
# problem. Selectors come from clients, so the quantifiers are possessive (`*+`): they never backtrack.
_NAME = r"\s*+([^\s=!,():]{2,}+(?::prefix)?+)"
_VALUE = r"\s*+([^\s,()!:]*+)"
_END = r"\s*+(?:,|$)"
_SET = r"\s*+\(([^()]++)\)"
_EQUAL = re.compile(_NAME + r"\s*+==?" + _VALUE + _END)
_NOT_EQUAL = re.compile(_NAME + r"\s*+!=" + _VALUE + _END)
_IN = re.compile(_NAME + r"\s++in" + _SET + _END)
_NOT_IN = re.compile(_NAME + r"\s++not\s?in" + _SET + _END)
_EXISTS = re.compile(_NAME + _END)
_NOT_EXISTS = re.compile(r"\s*+!" + _NAME + _END)
_SET_VALUE = re.compile(_VALUE + _END)


def parse_selector(text: str) -> pb.LabelSelector:
    """Parse a selector (see the module's grammar). An empty text selects everything. Raises InvalidInput."""
    include: list[pb.Label] = []
    exclude: list[pb.Label] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        if found := _EQUAL.match(text, position):
            include.append(_selector_label(*found.groups()))
        elif found := _NOT_EQUAL.match(text, position):
            exclude.append(_selector_label(*found.groups()))
        elif found := _IN.match(text, position):
            include.extend(_set_labels(text, found))
        elif found := _NOT_IN.match(text, position):
            exclude.extend(_set_labels(text, found))
        elif found := _EXISTS.match(text, position):
            include.append(_selector_label(found[1], ""))
        elif found := _NOT_EXISTS.match(text, position):
            exclude.append(_selector_label(found[1], ""))
        else:
            raise InvalidInput(
                f"{text[position:]!r} of the selector {text!r} is not an expression; "
                "use name=value, name!=value, name, !name, name in (a, b) or name notin (a, b)",
                field="selector",
            )
        position = found.end()
    result = pb.LabelSelector(include=_from_labels(include), exclude=_from_labels(exclude))
    try:
        validate_selector(result)
    except InvalidInput as err:
        raise InvalidInput(f"{text!r}: {err}", field="selector") from None
    return result


def _set_labels(text: str, found: re.Match[str]) -> Iterable[pb.Label]:
    name, values = found.groups()
    position = 0
    while position < len(values):
        value = _SET_VALUE.match(values, position)
        if value is None:
            raise InvalidInput(
                f"{values[position:]!r} of the selector {text!r} is not a list of values (a, b)", field="selector"
            )
        yield _selector_label(name, value[1])
        position = value.end()


def format_selector(selector: pb.LabelSelector) -> str:
    """Return the selector as text that `parse_selector` reads back: includes first, names in order."""
    return ",".join([*_format_side(selector.include, ""), *_format_side(selector.exclude, "!")])


def _format_side(labels: pb.LabelSet, negation: str) -> Iterable[str]:
    grouped: dict[str, list[str]] = {}
    for label in labels.labels:
        grouped.setdefault(label.name + (_PREFIX_SUFFIX if label.prefix else ""), []).append(label.value)
    for name in sorted(grouped):
        values = grouped[name]
        if len(values) > 1:
            yield f"{name} {'notin' if negation else 'in'} ({','.join(values)})"
        elif not values[0]:
            yield negation + name
        elif negation:
            yield f"{name}!={values[0]}"
        else:
            # The grammar reads "==" as one operator, so a value that begins with "=" has to follow "==".
            yield f"{name}{'==' if values[0].startswith('=') else '='}{values[0]}"
