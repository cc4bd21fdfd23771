"""`JsonFileStore`: the state as one JSON file in a recovery log.

Every transaction writes the whole file, so the store is for small states. The file has the layout of Gazette's
`JSONFileStore`: three JSON documents, one per line, with the sources' read offsets, the state and the checkpoint.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from coranto.errors import CorruptData
from coranto.messages.checkpoints import Checkpoint
from coranto.wire import consumer_pb2
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.stores.base import Store

STATE_FILE: Final = "state.json"
NEXT_FILE: Final = "next.json"

S = TypeVar("S")


class JsonFileStore(Store, Generic[S]):
    """A store whose `state` the application reads and changes.

    `dump` converts the state to values that `json` can encode, and `load` converts decoded values back. Pass both for
    states that are not plain JSON, such as models. The recorder's directory must have been recovered for this process
    only.
    """

    def __init__(
        self,
        recorder: Recorder,
        initial: S,
        *,
        dump: Callable[[S], Any] = lambda state: state,
        load: Callable[[Any], S] = lambda decoded: decoded,
    ) -> None:
        """`initial` is the state if the log has none. Raises CorruptData for an invalid state file."""
        self._recorder = recorder
        self._dump = dump
        self._checkpoint = Checkpoint()
        self.state = initial
        if recorder.exists(STATE_FILE):
            content = (recorder.directory / STATE_FILE).read_text(encoding="utf-8")
            decoded, self._checkpoint = decode_state(content)
            self.state = load(decoded)

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        await self._recorder.barrier()
        return self._checkpoint

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        content = _encode(self._dump(self.state), checkpoint)
        recorder = self._recorder
        try:
            recorder.after(wait_for)
            with recorder.together():
                fnode = recorder.create(NEXT_FILE)
                recorder.write(fnode, 0, content)
                recorder.rename(NEXT_FILE, STATE_FILE)
        except BaseException as error:
            if not recorder.has_failed:
                raise
            return failed(error)
        return recorder.barrier()

    async def destroy(self) -> None:
        await self._recorder.close()
        shutil.rmtree(self._recorder.directory, ignore_errors=True)


def failed(error: BaseException) -> Awaitable[None]:
    """Return the awaitable of a commit that could not begin. Awaiting it raises `error`."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_exception(error)
    return done


def _encode(state: Any, checkpoint: Checkpoint) -> bytes:
    offsets = {journal: source.read_through for journal, source in sorted(checkpoint.sources.items())}
    documents = (offsets, state, checkpoint_to_json(checkpoint))
    lines = (json.dumps(each, separators=(",", ":"), ensure_ascii=False, allow_nan=False) for each in documents)
    return "".join(f"{line}\n" for line in lines).encode()


def decode_state(content: str) -> tuple[Any, Checkpoint]:
    decoder, position, documents = json.JSONDecoder(), 0, []
    try:
        while position < len(content):
            document, position = decoder.raw_decode(content, position)
            documents.append(document)
            while content[position : position + 1].isspace():
                position += 1
        _, state, checkpoint = documents
        return state, checkpoint_from_json(checkpoint)
    except (ValueError, RecursionError) as error:
        raise CorruptData(
            f"{STATE_FILE} of {len(content)} characters is not a store's state: {error}; "
            "recover the log from other hints"
        ) from error


def checkpoint_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Convert a checkpoint to the JSON of Gazette's Go struct: bytes are in base64, and zero numbers are omitted."""
    sources: dict[str, Any] = {}
    wire = checkpoint.to_wire()
    for journal, source in sorted(wire.sources.items()):
        producers = [
            {"id": base64.b64encode(entry.id).decode(), "state": _scalars(entry.state)} for entry in source.producers
        ]
        sources[journal] = _scalars(source) | {"producers": producers or None}
    intents = {journal: base64.b64encode(intent).decode() for journal, intent in sorted(checkpoint.ack_intents.items())}
    own = consumer_pb2.Checkpoint(identity=wire.identity if wire.HasField("identity") else None, batch=wire.batch)
    return {"sources": sources} | ({"ack_intents": intents} if intents else {}) | MessageToDict(own)


def _scalars(message: consumer_pb2.Checkpoint.Source | consumer_pb2.Checkpoint.ProducerState) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields() if isinstance(value, int | str)}


def checkpoint_from_json(document: Any) -> Checkpoint:
    """Return the checkpoint in a decoded document. Raises CorruptData."""
    try:
        own = {name: document[name] for name in ("identity", "batch") if name in document}
        wire = ParseDict(own, consumer_pb2.Checkpoint(), ignore_unknown_fields=True)
        for journal, source in (document.get("sources") or {}).items():
            entry = wire.sources[journal]
            entry.read_through = source.get("read_through", 0)
            entry.journal_id = source.get("journal_id", "")
            for producer in source.get("producers") or ():
                state = producer.get("state") or {}
                added = entry.producers.add(id=base64.b64decode(producer.get("id", ""), validate=True))
                added.state.last_ack = state.get("last_ack", 0)
                added.state.begin = state.get("begin", 0)
                added.state.seen_through = state.get("seen_through", 0)
        for journal, intent in (document.get("ack_intents") or {}).items():
            wire.ack_intents[journal] = base64.b64decode(intent, validate=True)
    except (AttributeError, TypeError, ValueError, binascii.Error, ParseError) as error:
        raise CorruptData(f"not a checkpoint in JSON: {error}") from error
    return Checkpoint.from_wire(wire)
