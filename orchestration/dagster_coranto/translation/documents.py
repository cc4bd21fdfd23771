"""Files of ingests and tables, and the definitions of the assets that they describe."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import dagster as dg

from coranto.errors import InvalidInput

T = TypeVar("T")


def read_document(file: Path, read: Callable[[str], T], field: str) -> T:
    """Return the parsed content of a file. Raises InvalidInput, with the file and the line, about `field`."""
    try:
        return read(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInput(f"there is no file {file}: write it, or correct the path", field=field) from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8: {error}", field=field) from error
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error}", field=field) from error


class Definitions(Generic[T]):
    """Registry of the definitions of assets that the function `builder` returns."""

    def __init__(self, builder: str) -> None:
        self._builder = builder
        self._by_op: WeakKeyDictionary[dg.OpDefinition, T] = WeakKeyDictionary()

    def add(self, asset: dg.AssetsDefinition, definition: T) -> dg.AssetsDefinition:
        """Register the definition of an asset. Returns the asset."""
        self._by_op[asset.op] = definition
        return asset

    def of(self, asset: dg.AssetsDefinition) -> T:
        """Return the definition of an asset. Raises InvalidInput for an asset of another function."""
        try:
            return self._by_op[asset.op]
        except KeyError:
            raise InvalidInput(f"{asset.key} is not an asset of {self._builder}", field="asset") from None
