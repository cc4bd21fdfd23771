"""`coranto consumer offsets`: the offsets of a consumer's checkpoint, for `--as-of`."""

from __future__ import annotations

import json

import typer

from coranto.errors import InvalidInput
from coranto.offsets import vector_to_json
from coranto_consumers.cli.arguments import ConsumerName, Store
from coranto_consumers.stores.reading import read_checkpoint


def offsets(name: ConsumerName, store: Store) -> None:
    """Print the offsets of a consumer's checkpoint as JSON.

    `coranto journals read --as-of FILE` and `coranto journals manifest --as-of FILE` show the content up to these
    offsets.
    """
    found = read_checkpoint(store, name)
    if found is None or not found.checkpoint.sources:
        raise InvalidInput(f"consumer {name!r} has no checkpoint in the store", field="NAME")
    typer.echo(json.dumps(vector_to_json(found.checkpoint.offsets), indent=2))
