"""What a failure of an object store means, told from what the store library says of it.

The library tells some refusals apart by their type, but not all: listings that are denied, removals that are, and
buckets that do not exist look like any other failure. The services' own words, which it quotes, tell them.
"""

from __future__ import annotations

import re
from typing import Final

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from coranto.errors import FragmentNotFound, StoreDenied, StoreError

_STATUS: Final = re.compile(r"status code: (\d{3}) ([A-Za-z ]+)(?:: (?!<)([^\n]*))?")
_IN_XML: Final = re.compile(r"<Code>([^<]+)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_OF_REMOVAL: Final = re.compile(r"failed for key .*: (.*) \(code: (\w+)\)")
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_NO_CONNECTION: Final = re.compile(r"kind: Connect\b.*", re.DOTALL)
_WHY_NO_CONNECTION: Final = (re.compile(r'message: "([^"]*)"'), re.compile(r'ConnectError\(\s*"([^"]*)"'))
_MOST_WORDS: Final = 300


def store_error(action: str, subject: str, url: str, error: Exception) -> StoreError:
    """The error to raise for one that the store library raised on `action` (such as "put") of `subject`."""
    text = str(error)
    status, code, words = _words(text)
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
    if code in _NO_BUCKET or (isinstance(error, FileNotFoundError) and action == "put" and status == "404"):
        what = "container" if url.startswith("azure") else "bucket"
        return StoreError(f"cannot {action} {subject} in {url}: there is no such {what} ({code or status}). Create it.")
    if isinstance(error, FileNotFoundError):
        return FragmentNotFound(f"{url} has no {subject}")
    if denied or status in ("401", "403") or code == "AccessDenied":
        return StoreDenied(
            f"cannot {action} {subject} in {url}: {words}. Check the store's credentials and what they are granted."
        )
    return StoreError(f"cannot {action} {subject} in {url}: {words}")


def _words(text: str) -> tuple[str, str, str]:
    """The HTTP status and the service's error code, where they are known, and a line for people."""
    first_line = text.strip().split("\n", 1)[0]
    answer = _STATUS.search(text)
    status, reason, body = answer.groups(default="") if answer else ("", "", "")
    if found := _IN_XML.search(text):
        code, message = found.groups(default="")
        # Azure goes on with the request's id and time, on lines of their own.
        message = message.strip().split("\n", 1)[0]
        return status, code, f"{code}: {message.rstrip('.')} ({status} {reason})" if message else f"{code} ({status})"
    if found := _OF_REMOVAL.search(first_line):
        message, code = found.groups()
        return status, code, f"{code}: {message}"
    if found := _NO_CONNECTION.search(text):
        why = next((match[1] for each in _WHY_NO_CONNECTION if (match := each.search(found[0]))), "")
        return status, "", f"no connection to the service{f' ({why})' if why else ''}"
    if status:
        return status, "", f"{status} {reason}{f': {body[:_MOST_WORDS].strip()}' if body.strip() else ''}"
    return "", "", first_line or "unknown failure"
