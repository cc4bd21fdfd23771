"""Files of offsets: the progress of reads, as a JSON object of journal names and offsets."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from coranto.effects import LocalDisk
from coranto.errors import InvalidInput


def load_offsets(path: Path, option: str = "--offsets") -> dict[str, int]:
    """Return the offsets in a file. Raises InvalidInput, which names the option, if it is missing or malformed."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput(
            f"there is no file {path}; for a first run omit {option}, or create the file with {{}} in it",
            field=option,
        ) from error
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", field=option) from error
    if not isinstance(content, dict):
        raise InvalidInput(
            f"{path} is not a JSON object of journals and offsets, such as {{'a/journal': 0}}}}", field=option
        )
    for journal, offset in content.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidInput(
                f"{path} has the offset {offset!r} for {journal}; give a whole number of 0 or more", field=option
            )
    return content


class OffsetsFile:
    """Writes offsets to `path`, atomically. The file from before the first write is kept as `path` + `.previous`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = False

    def save(self, offsets: dict[str, int]) -> None:
        if not self._saved and self._path.exists():
            previous = self._path.with_name(self._path.name + ".previous")
            partial = previous.with_name(f".{previous.name}.{os.getpid()}.partial")
            shutil.copyfile(self._path, partial)
            partial.replace(previous)
        content = json.dumps(dict(sorted(offsets.items())), indent=2)
        LocalDisk().write_atomic(self._path, content.encode() + b"\n")
        self._saved = True
