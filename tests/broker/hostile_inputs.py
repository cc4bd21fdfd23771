"""Run every reader of input on texts that are made to keep it busy: `python hostile_inputs.py <length>`.

Before each call, a line names the reader and its input. The last line of a hanging process names the cause.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from coranto import labels
from coranto.errors import CorantoError
from coranto.fragments.fragment import parse_content_path
from coranto.fragments.go_time import format_time
from coranto.fragments.postfix import PostfixTemplate
from coranto.fragments.store_errors import store_error
from coranto.fragments.store_urls import parse_store_url
from coranto.messages import csv_rows, torn_lines
from coranto.names import validate_journal, validate_token
from coranto.publication import ledger
from coranto.specs import journal_tree
from coranto.specs.durations import parse_duration
from coranto.types import kinds, parsing, references, writing
from coranto_broker.http.requests import append_request, read_request
from coranto_consumers.runtime import batch_reading
from coranto_consumers.spark.decoding import json_values, parsers
from coranto_consumers.spark.inputs import frames
from coranto_consumers.spark.session import task_errors
from coranto_consumers.stores import connection_errors, mysql, rejections, sql_dialects

AT = datetime(2024, 1, 2, tzinfo=UTC)


def _rows(text: str) -> None:
    row = text.encode()
    csv_rows._ROW.match(row)
    csv_rows._BEGIN_OF_ROW.match(row)
    for _ in csv_rows._FIELDS.finditer(row):
        continue


def _csv_field(text: str) -> None:
    for pattern in (parsers._INTEGER, parsers._NUMBER):
        pattern.fullmatch(text)


def _failed_task(text: str) -> None:
    for pattern in (task_errors._LINE, task_errors._LACKING):
        pattern.search(text)


def _value_of_a_type(text: str) -> None:
    for pattern in (writing._DAY, writing._LOCAL, writing._ZONED, writing._NUMBER, json_values._BASE64):
        pattern.fullmatch(text)


def _rejected_row(text: str) -> None:
    rejections._copied_column(text, f'COPY "t" ("a", "{text}") FROM STDIN')
    rejections._copied_column(f"COPY t, line 1, column {text}", 'COPY "t" ("a") FROM STDIN')
    list(rejections._MYSQL_NAMES.finditer(text))


def _torn_line(text: str) -> None:
    torn_lines.divide(text.encode(), lambda piece: piece.endswith(b"}"), lambda piece: b"{" in piece)


READERS: Mapping[str, Callable[[str], object]] = {
    "template": PostfixTemplate,
    "selector": labels.parse_selector,
    "duration": parse_duration,
    "store's URL": parse_store_url,
    "layout of a time": lambda text: format_time(text, AT),
    "failure of a store": lambda text: store_error("get", "x", "s3://b/", OSError(text)),
    "journal": validate_journal,
    "token": lambda text: validate_token("token", text, 1, 1 << 30),
    "path of a fragment": lambda text: parse_content_path("a/journal", text),
    "read over HTTP": lambda text: read_request("/" + text, [text], metadata_only=False),
    "append over HTTP": lambda text: append_request("/journal?check_registers=" + text),
    "row": _rows,
    "media type": lambda text: labels.validate_journal_labels(labels.label_set({labels.CONTENT_TYPE: text})),
    "statement": mysql._ENDS_TRANSACTION.match,
    "failure of a task": _failed_task,
    "rejected row": _rejected_row,
    "refused connection": lambda text: connection_errors._STATE.findall(b"B\t1\tErrorResponse\t" + text.encode()),
    "torn line": _torn_line,
    "torn row": lambda text: csv_rows._UUID.search(text.encode()),
    "halves of surrogates": lambda text: batch_reading._ESCAPED.sub(b"?", text.encode()),
    "statement of an application": sql_dialects._MODIFIERS.search,
    "field of CSV": _csv_field,
    "fields of a type": parsing.parse_fields,
    "name of a field": kinds._PLAIN_NAME.fullmatch,
    "columns of a consumer": frames._ALL.match,
    "reference to a type": references.parse_reference,
    "value of a type": _value_of_a_type,
    "register of a ledger": ledger._SUMMARY_VALUE.fullmatch,
    "tree of specs": journal_tree.parse_tree,
}
SLOW = frozenset({"tree of specs"})
"""Linear, but slow: PyYAML takes a millisecond for some hundred characters."""

QUOTED = ['"', '""', "`", "``", '{{"', '{{ printf "%', "\\", '\\"', "{{", "}}", "(", ")", " ", "\n"]
OTHERS = [
    *("a", "0", "9", "-", "%", "%0", ".", ".0", "/", "//", "/*", "/**/", "*/ /*", "=", "==", ",", "a,", "a in (", "a="),
    *("!", ":", "a:prefix", "1s", "1.", "Jan", ".9", "<Code>", "<Code>a</Code>", "failed for key ", "&", "?", "%2f"),
    *("failed for key : (code: a", " (code: ", "status code: 403 a", "kind: Connect ", 'message: "', "ConnectError("),
    *(
        "CorruptMessage: journal ",
        "InvalidInput: a: ",
        "bytes=0-",
        "x=1&",
        "- a",
        "a: b",
        "[",
        "{",
        "<<: *a",
        "é",
        "\0",
    ),
    *("a INT,", "a `", "ARRAY<", "1900-01-01 00:00:00.", "1e", "QUJD", "QQ==", "* "),
    *(
        "COPY a",
        ", line 1, column ",
        "Column ",
        "for key '",
        "CONSTRAINT `",
        'role "',
        "\\ud83d",
        "INSERT OR a ",
        '{"a":',
        "{}",
    ),
    *("ANALYZE ", "s3://b/?find=", "{{ (", "{{/*", "*/", "{{- ", " -}}"),
]
ENDS = ["", "!", '"', "}}", " (x"]


def texts(length: int) -> Iterator[str]:
    for piece, end in itertools.product((*QUOTED, *OTHERS), ENDS):
        yield piece * (length // len(piece)) + end
    for one, other in itertools.product(QUOTED, QUOTED):
        yield "{{" + (one + other) * (length // len(one + other)) + "!"
    for one, other in itertools.product(OTHERS, ENDS[1:]):
        yield other + one * (length // len(one)) + "!"


def main(length: int) -> None:
    for name, read in READERS.items():
        for text in texts(min(length, 400) if name in SLOW else length):
            sys.stdout.write(f"{name}: {text[:20]!r}…{text[-20:]!r}\n")
            sys.stdout.flush()
            with contextlib.suppress(CorantoError, ValueError):
                read(text)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
