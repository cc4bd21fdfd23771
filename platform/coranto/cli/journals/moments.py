"""Moments on the command line: `--as-of` with a time, or with a file of the journals' offsets at that time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from coranto.cli.journals.offsets import load_offsets
from coranto.cli.journals.selection import Selection, select
from coranto.cli.journals.times import parse_time
from coranto.client import JournalClient, Moment
from coranto.client.moments import moment_at, require_past
from coranto.errors import InvalidInput

AskedMoment: TypeAlias = float | Mapping[str, int]
"""A time in Unix seconds, or the end offsets of journals."""


def parse_as_of(text: str, option: str = "--as-of") -> AskedMoment | None:
    """Parse the option: the name of a file of offsets, or a time. Raises InvalidInput."""
    if not text:
        return None
    path = Path(text)
    if path.is_file() or path.suffix == ".json":
        return load_offsets(path, option)
    at = float(parse_time(text, time.time(), option))
    require_past(at, option)
    return at


async def find_moment(
    client: JournalClient, selection: Selection, asked: AskedMoment, begins: Mapping[str, int], begin: int = 0
) -> Moment:
    """Return the moment of the selected journals, and check that its content exists.

    The content begins at `begins`, or else at `begin`. Raises ContentGone, and InvalidInput for offsets that do not
    name all of the journals.
    """
    journals = await select(client, selection)
    names = [info.name for info in journals]
    if isinstance(asked, Mapping):
        if missing := sorted(set(names) - set(asked)):
            raise InvalidInput(f"has no offset of {', '.join(missing)}; name all selected journals", field="--as-of")
        ends = {name: asked[name] for name in names}
    else:
        ends = dict((await moment_at(client, journals, asked)).ends)
    starts = {name: min(begins.get(name, begin), ends[name]) for name in names}
    moment = Moment.offsets(ends, starts)
    await client.require_content(moment)
    return moment
