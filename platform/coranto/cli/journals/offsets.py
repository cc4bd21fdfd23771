"""Files of offsets: the progress of reads, as JSON of an offset vector (`coranto.offsets`)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from coranto.effects import LocalDisk
from coranto.errors import InvalidInput
from coranto.offsets import vector_of_json, vector_to_json


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
    return vector_of_json(content, f"{option}: {path}")


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
        content = json.dumps(vector_to_json(offsets), indent=2)
        LocalDisk().write_atomic(self._path, content.encode() + b"\n")
        self._saved = True
