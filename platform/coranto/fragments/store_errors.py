"""Translation of the store library's errors to errors of Coranto.

The library has types for some refusals, but not for all: denied listings, denied removals and missing buckets look like
any other failure. This module recognizes them in the service's answer, which the library quotes.
"""

from __future__ import annotations

import re
from typing import Final

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from coranto.errors import FragmentNotFound, StoreDenied, StoreError

# Error texts quote the store's answer, which is not trusted. So every pattern matches in linear time.
_STATUS: Final = re.compile(r"status code: (\d{3}) ([A-Za-z ]++)(?:: (?!<)([^\n]*+))?")
_IN_XML: Final = re.compile(r"<Code>([^<]++)</Code>(?:\s*+<Message>([^<]*+)</Message>)?")
_PLAIN_CODE: Final = re.compile(r"[A-Za-z]{1,64}")
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_NO_CONNECTION: Final = re.compile(r"kind: Connect\b.*+", re.DOTALL)
_WHY_NO_CONNECTION: Final = (re.compile(r'message: "([^"]*+)"'), re.compile(r'ConnectError\(\s*+"([^"]*+)"'))
_MAX_WORDS: Final = 300
_MAX_TEXT: Final = 16_384


def store_error(action: str, subject: str, url: str, error: Exception) -> StoreError:
    """Return the error to raise for an error of the store library during `action` (such as "put") on `subject`.

    Its message quotes the store. Its `kind` does not, so that a user who makes a broker call a URL cannot read content
    that only the broker can reach.
    """
    text = str(error)[:_MAX_TEXT]
    status, code, words = _words(text)
    what, advice = f"cannot {action} {subject} in {url}", ""
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
    made: type[StoreError] = StoreError
    if code in _NO_BUCKET or (isinstance(error, FileNotFoundError) and action == "put" and status == "404"):
        kind = "container" if url.startswith("azure") else "bucket"
        return StoreError(f"{what}: there is no such {kind} ({code or status}). Create it.")
    if isinstance(error, FileNotFoundError):
        return FragmentNotFound(f"{url} has no {subject}")
    if denied or status in ("401", "403") or code == "AccessDenied":
        made, advice = StoreDenied, ". Check the store's credentials and their rights."
    return made(f"{what}: {words}{advice}", kind=f"{what}: {_kind(error, text, status, code)}{advice}")


def _kind(error: Exception, text: str, status: str, code: str) -> str:
    """Return the kind of failure; for an answer, only its status and code."""
    parts = [code if _PLAIN_CODE.fullmatch(code) else "", status]
    if description := " ".join(filter(None, parts)):
        return description
    if _NO_CONNECTION.search(text):
        return "no connection to the service"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}; see the log of the process that called the store"


def _words(text: str) -> tuple[str, str, str]:
    """Return the HTTP status and the service's error code, if known, and a readable line."""
    first_line = text.strip().split("\n", 1)[0]
    answer = _STATUS.search(text)
    status, reason, body = answer.groups(default="") if answer else ("", "", "")
    if found := _IN_XML.search(text):
        code, message = found.groups(default="")
        # Azure adds the request's id and time on further lines.
        message = message.strip().split("\n", 1)[0]
        return status, code, f"{code}: {message.rstrip('.')} ({status} {reason})" if message else f"{code} ({status})"
    if of_removal := _of_removal(first_line):
        code, message = of_removal
        return status, code, f"{code}: {message}"
    if found := _NO_CONNECTION.search(text):
        why = next((match[1] for each in _WHY_NO_CONNECTION if (match := each.search(found[0]))), "")
        return status, "", f"no connection to the service{f' ({why})' if why else ''}"
    if status:
        return status, "", f"{status} {reason}{f': {body[:_MAX_WORDS].strip()}' if body.strip() else ''}"
    return "", "", first_line or "unknown failure"


def _of_removal(line: str) -> tuple[str, str] | None:
    """Return code and message of `… failed for key <key>: <message> (code: <code>)…`; None for any other line."""
    _, found, rest = line.partition("failed for key ")
    rest, _, code = rest.rpartition(" (code: ")
    code, closed, _ = code.partition(")")
    message = rest.rpartition(": ")[2]
    return (code, message) if found and closed and code and message else None
