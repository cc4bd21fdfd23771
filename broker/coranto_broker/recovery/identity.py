"""The identity of clusters and data directories: pure values, and the rules for matching a directory and an etcd.

Spools are meaningful only together with the etcd that they were written with. That etcd has the journals' specs, and
stamps and in-sync records refer to its revisions. So three places must agree:

* etcd has a `ClusterIdentity` with a random id, which was created when the first broker started.
* For each broker, etcd has a mark of its last *use* of the cluster: a random word, which changes from time to time
  while the broker runs.
* A data directory has in `identity.json` its cluster, the last such word, and the latest revision that it has seen.

An etcd that was emptied or replaced has another id. An etcd that was restored from a backup is behind the directory's
revision, or has an older word. A copy of a data directory has an older word than etcd.

Revisions here, in stamps and in in-sync records are *rebased*: they are etcd's revisions plus the `base` of the
cluster. `base` is raised when brokers adopt a restored etcd. So revisions that etcd issued twice still compare
correctly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from coranto.errors import InvalidInput

IDENTITY_FILE = "identity.json"


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """The entry in etcd that identifies its cluster.

    While `gathering`, brokers report one after the other their knowledge from before the restore of etcd, and no broker
    serves. `gathered` are the brokers that have reported, and `known` the brokers that they have seen.
    """

    id: str
    base: int = 0
    base_before: int = 0
    """The `base` of the keys that were restored."""
    gathering: bool = False
    gathered: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """Earlier ids of the cluster."""
    since: int = 0
    """The rebased revision at the end of gathering."""

    def missing(self, used: tuple[str, ...], without: tuple[str, ...]) -> list[str]:
        """Return the brokers that must still report, except those in `without`. `used` are the brokers in etcd."""
        return sorted({*self.known, *used} - {*self.gathered, *without})

    def gather(self, new_id: str, seen: int, former: str) -> ClusterIdentity:
        """Return the cluster at the start of gathering. `seen` is the rebased revision that the first broker has seen.

        `former` is the cluster id in that broker's data directory, or empty.
        """
        before = tuple(dict.fromkeys(each for each in (*self.before, self.id, former) if each))
        base = max(self.base, seen)
        return ClusterIdentity(new_id, base, base_before=self.base, gathering=True, before=before)

    def joined(self, broker: str, seen: int, known: tuple[str, ...], former: str) -> ClusterIdentity:
        """Return the cluster after a broker has reported its knowledge."""
        return replace(
            self,
            base=max(self.base, seen),
            gathered=tuple(sorted({*self.gathered, broker})),
            known=tuple(sorted({*self.known, *known})),
            before=tuple(dict.fromkeys(each for each in (*self.before, former) if each)),
        )


@dataclass(frozen=True, slots=True)
class DirectoryUse:
    """A broker's last use of the cluster. `place` is the data directory (`coranto.process.dirlock.directory_id`)."""

    word: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryIdentity:
    """The content of a data directory's `identity.json`.

    `next_word` is the word that is being written to etcd. After a crash during the write, the broker recognizes it.
    `revision` is rebased. `brokers` are the brokers that were seen last.
    """

    cluster: str
    etcd: int
    prefix: str
    broker: str
    word: str
    next_word: str = ""
    revision: int = 0
    brokers: tuple[str, ...] = ()


def differences(
    identity: DirectoryIdentity, found: DirectoryIdentity, cluster: ClusterIdentity | None, use: DirectoryUse | None
) -> Iterator[str]:
    """Describe the differences between a data directory's `identity` and the `found` one. Ignores `found.word`."""
    if identity.prefix != found.prefix:
        yield f"the directory is of etcd prefix {identity.prefix}, and the prefix given is {found.prefix}"
    if identity.broker != found.broker:
        yield f"the directory is of broker {identity.broker}, and the broker is to be {found.broker}"
    if identity.prefix != found.prefix:
        return  # The keys at another prefix say nothing about the directory.
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
ValueT = TypeVar("ValueT", ClusterIdentity, DirectoryUse, DirectoryIdentity)


def encode(value: ClusterIdentity | DirectoryUse | DirectoryIdentity) -> bytes:
    """Encode a value as JSON, so that operators can read it."""
    return json.dumps(asdict(value), indent=1).encode()


def decode(kind: type[ValueT], content: bytes, source: str) -> ValueT:
    """Decode a value of that kind. Raises InvalidInput, which names `source`, if `content` is not one."""
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
        raise InvalidInput(f"{source} cannot be read: {error}; restore it from a copy", field=source) from error


def _field(name: str, value: Any, kind: type[Any]) -> Any:
    """Return `value` if it is of that kind, with a list of strings as a tuple. Raises TypeError if it is not."""
    fits = type(value) is kind and (kind is not list or all(type(each) is str for each in value))
    if not fits:
        raise TypeError(f"{name} is {value!r}")
    return tuple(value) if kind is list else value
