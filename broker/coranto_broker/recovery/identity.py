"""Which cluster a data directory is of, and whether the etcd that a broker was given is that cluster's still: pure
values and rules.

Spools mean something only beside the etcd that they were written with: it says which journals there are, and stamps and
in-sync records name its revisions. So three places agree:

* etcd says which `Cluster` it is: an id that was drawn when the first broker started.
* etcd says of each broker when it last *used* the cluster, by a word that nobody else knows and that changes as long as
  the broker runs.
* a data directory says in `identity.json` of what cluster it is, the last such word, and the latest revision that it
  has seen.

An etcd that was emptied, or replaced by another one, has another id. One that was restored from a backup is behind the
directory's revision or knows an older word. And a copy of a data directory knows an older word than etcd.

Revisions here, in stamps and in in-sync records are *counted on*: to those of etcd the cluster's `base` is added. It is
raised when brokers take up an etcd that was restored, so that revisions that were given out twice never compare
wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from coranto.errors import InvalidInput

IDENTITY_FILE = "identity.json"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What etcd says of the cluster that it is of.

    While `gathering`, brokers say one after the other what they know from before etcd was restored (`gathered` have),
    and nobody serves. `known` are brokers that those have seen.
    """

    id: str
    base: int = 0
    base_before: int = 0
    """That of the keys that were restored."""
    gathering: bool = False
    gathered: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """Ids that the cluster had before."""
    since: int = 0
    """The revision, counted on, at which gathering ended."""

    def missing(self, used: tuple[str, ...], without: tuple[str, ...]) -> list[str]:
        """Brokers that should still say what they know; `used` are those that etcd knows of."""
        return sorted({*self.known, *used} - {*self.gathered, *without})

    def gather(self, new_id: str, seen: int, former: str) -> Cluster:
        """The cluster once brokers have begun to gather, on behalf of one that has seen that revision, counted on."""
        before = tuple(dict.fromkeys(each for each in (*self.before, self.id, former) if each))
        base = max(self.base, seen)
        return Cluster(new_id, base, base_before=self.base, gathering=True, before=before)

    def joined(self, broker: str, seen: int, known: tuple[str, ...], former: str) -> Cluster:
        """The cluster once a broker has said what it knows."""
        return replace(
            self,
            base=max(self.base, seen),
            gathered=tuple(sorted({*self.gathered, broker})),
            known=tuple(sorted({*self.known, *known})),
            before=tuple(dict.fromkeys(each for each in (*self.before, former) if each)),
        )


@dataclass(frozen=True, slots=True)
class Use:
    """What etcd says of a broker's last use. `place` names the data directory (`coranto.process.dirlock.place_of`)."""

    word: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a data directory says of itself.

    `next_word` is the one that is being written to etcd, so that a broker which dies in between finds its own.
    `revision` is counted on. `brokers` are those that were seen last.
    """

    cluster: str
    etcd: int
    prefix: str
    broker: str
    word: str
    next_word: str = ""
    revision: int = 0
    brokers: tuple[str, ...] = ()


def differences(identity: Identity, found: Identity, cluster: Cluster | None, use: Use | None) -> Iterator[str]:
    """How a data directory and what its broker finds differ, with both values. `found.word` does not matter."""
    if identity.prefix != found.prefix:
        yield f"the directory is of etcd prefix {identity.prefix}, and the prefix given is {found.prefix}"
    if identity.broker != found.broker:
        yield f"the directory is of broker {identity.broker}, and the broker is to be {found.broker}"
    if identity.prefix != found.prefix:
        return  # What etcd has there says nothing about the directory.
    if identity.etcd != found.etcd:
        yield f"the directory is of etcd cluster id {identity.etcd:#x}, and this etcd has {found.etcd:#x}"
    if cluster is None or identity.cluster != cluster.id:
        there = f"this etcd is of {cluster.id}" if cluster is not None else "this etcd knows no cluster at that prefix"
        yield f"the directory is of cluster {identity.cluster}, and {there}"
        return
    if identity.revision > found.revision:
        yield f"the directory has seen etcd revision {identity.revision}, and this etcd is at {found.revision}"
    if identity.broker == found.broker and (use is None or use.word not in (identity.word, identity.next_word)):
        there = f"{use.word} (of {use.place or 'an unknown directory'})" if use is not None else "none"
        yield f"the directory's last use of etcd was {identity.word}, and etcd's last use by this broker is {there}"


_KINDS: dict[str, type] = {"str": str, "int": int, "bool": bool}
ValueT = TypeVar("ValueT", Cluster, Use, Identity)


def encode(value: Cluster | Use | Identity) -> bytes:
    """As JSON, for people to read, too."""
    return json.dumps(asdict(value), indent=1).encode()


def decode(kind: type[ValueT], content: bytes, source: str) -> ValueT:
    """Raises InvalidInput, which names `source`, for what is none."""
    try:
        document: dict[str, Any] = json.loads(content)
        given: dict[str, Any] = {}
        for field in fields(kind):
            if field.name not in document:
                continue
            value: Any = document[field.name]
            given[field.name] = _field(field.name, value, _KINDS.get(str(field.type), list))
        return kind(**given)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"{source} cannot be read: {error}", field=source) from error


def _field(name: str, value: Any, kind: type[Any]) -> Any:
    """A value of that type, a list of texts as a tuple. Raises TypeError."""
    fits = type(value) is kind and (kind is not list or all(type(each) is str for each in value))
    if not fits:
        raise TypeError(f"{name} is {value!r}")
    return tuple(value) if kind is list else value
