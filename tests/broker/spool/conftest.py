"""Fixtures: spools in folders, and observers of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coranto import labels
from coranto.fragments.fragment import Codec, Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, Sealed, SpoolFolder, folder_of
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import ProposalDecision, empty_at
from tests.broker.running import FaultyDisk, ManualClock

JOURNAL = "a/journal"


MINE = labels.label_set(author="me")


@dataclass
class Observer:
    """Records the content that the spool has made visible."""

    visible: list[tuple[int, int]] = field(default_factory=list)
    sealed: list[Sealed] = field(default_factory=list)
    urgent: list[bool] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    ahead: int = 0
    readable: int = 0

    def spool_ahead(self, end: int) -> None:
        self.ahead = end

    def spool_readable(self, end: int) -> None:
        self.readable = end

    def spool_skip(self, offset: int) -> None:
        self.skips.append(offset)

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        self.visible.append((fragment.begin, fragment.end))

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        self.sealed.append(sealed)
        self.urgent.append(primary)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
def folder(tmp_path: Path, disk: FaultyDisk) -> SpoolFolder:
    return SpoolFolder(folder_of(tmp_path, JOURNAL, 7), JOURNAL, 7, disk, ManualClock())


@pytest.fixture
def spool(folder: SpoolFolder, observer: Observer) -> DurableSpool:
    return DurableSpool(folder, observer, Fsync.NEVER)


def append(spool: DurableSpool, content: bytes, registers: pb.LabelSet | None = None) -> ProposalDecision:
    spool.write(spool.delta, content)
    return spool.propose(spool.next_fragment(), registers or spool.registers, primary=True)


def roll(spool: DurableSpool, offset: int | None = None, codec: Codec = Codec.GZIP) -> ProposalDecision:
    end = spool.end if offset is None else offset
    return spool.propose(empty_at(spool.fragment, end, codec), spool.registers, primary=True)


def names(folder: SpoolFolder) -> list[str]:
    return folder.disk.list(folder.path)


def content_of(sealed: Sealed) -> bytes:
    with sealed.content.borrow() as file:
        return file.read_at(0, sealed.fragment.length + 1)
