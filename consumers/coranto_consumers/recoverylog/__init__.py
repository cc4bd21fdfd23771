"""Recovery logs: journals that record the changes of a folder's files, to rebuild the files elsewhere."""

from coranto_consumers.recoverylog.authority import Authority, Handoff, MemoryAuthority, Ownership
from coranto_consumers.recoverylog.directory import RecordedDirectory, RecordedFile
from coranto_consumers.recoverylog.fsm import ApplyResult, Fsm
from coranto_consumers.recoverylog.hint_store import EtcdAuthority, HintKeys, HintStore, StoredHints
from coranto_consumers.recoverylog.hints import Hints, LiveFnode
from coranto_consumers.recoverylog.operations import Author, Fnode, RecordedOperation, fence_of, new_author
from coranto_consumers.recoverylog.player import Player, RecoveredFiles
from coranto_consumers.recoverylog.pruning import Pruned, ShardHints, prune_logs
from coranto_consumers.recoverylog.recorder import Recorder
from coranto_consumers.recoverylog.segments import LogSegment, SegmentSet
from coranto_consumers.recoverylog.standby import LogOwner, LogStandby

__all__ = [
    "ApplyResult",
    "Author",
    "Authority",
    "EtcdAuthority",
    "Fnode",
    "Fsm",
    "Handoff",
    "HintKeys",
    "HintStore",
    "Hints",
    "LiveFnode",
    "LogOwner",
    "LogSegment",
    "LogStandby",
    "MemoryAuthority",
    "Ownership",
    "Player",
    "Pruned",
    "RecordedDirectory",
    "RecordedFile",
    "RecordedOperation",
    "Recorder",
    "RecoveredFiles",
    "SegmentSet",
    "ShardHints",
    "StoredHints",
    "fence_of",
    "new_author",
    "prune_logs",
]
