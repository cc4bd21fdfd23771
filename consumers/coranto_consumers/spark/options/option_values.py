"""Values of options: numbers, flags, choices and offsets, with errors that name the option."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from coranto.errors import InvalidInput

BYTES_HINT: Final = " of bytes, such as 67108864"
TASKS_HINT: Final = ", such as 8"
SPARK_OPTIONS: Final = frozenset(("checkpointlocation", "queryname", "path"))
"""The options that Spark adds to a source or sink, in lower case. They are ignored."""


def require_known(key: str, names: Iterable[str]) -> None:
    """Raise InvalidInput for an option that is neither in `names` nor one of `SPARK_OPTIONS`."""
    known = {name.lower(): name for name in names}
    if key.lower() in known or key.lower() in SPARK_OPTIONS:
        return
    close = difflib.get_close_matches(key.lower(), known, n=1)
    hint = f"did you mean {known[close[0]]}?" if close else f"there are {', '.join(sorted(known.values()))}"
    raise InvalidInput(f"there is no such option; {hint}", field=f"option {key}")


def offsets_option(text: str, name: str, words: str) -> dict[str, Any]:
    """Parse an option with offsets as a JSON object. Does not check the object's values. Raises InvalidInput."""
    where = f"option {name}"
    try:
        offsets = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is neither {words} nor JSON: {error}", field=where) from error
    if not isinstance(offsets, dict):
        raise InvalidInput(f"{text!r} is not a JSON object of journals and offsets", field=where)
    return offsets


def number_option(
    given: Mapping[str, str], name: str, default: int, *, least: int = 1, hint: str = " of messages, such as 100000"
) -> int:
    """Return an option's number. Raises InvalidInput, with `hint` after "a number" in its text."""
    text = given.get(name.lower(), str(default))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        kind = "a positive number" if least else "a number"
        raise InvalidInput(f"{text!r} is not {kind}{hint}", field=f"option {name}")
    return int(text)


def choice_option(given: Mapping[str, str], name: str, choices: Iterable[str], default: str) -> str:
    """Return the choice that an option names. Case is ignored. Raises InvalidInput."""
    text, found = given.get(name.lower(), default), {each.lower(): each for each in choices}
    if text.lower() not in found:
        raise InvalidInput(f"{text!r} is not one of {', '.join(found.values())}", field=f"option {name}")
    return found[text.lower()]


def flag_option(given: Mapping[str, str], name: str, default: bool) -> bool:
    """Return an option's boolean value. Raises InvalidInput."""
    text = given.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidInput(f"{text!r} is neither true nor false; write one of them", field=f"option {name}")
    return text == "true"
