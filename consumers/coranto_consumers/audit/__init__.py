"""Audit of consumers across stores: it compares checkpoints, fences and tables with journals and their content.

`ConsumerCheck` is a check of `coranto.audit`, so any report can include its findings. No orchestrator is needed.
"""

from coranto.extras import with_install_advice

try:
    from coranto_consumers.audit.check import ConsumerCheck
    from coranto_consumers.audit.evidence import Evidence, EvidenceSource, SqlEvidence
    from coranto_consumers.audit.expectations import MESSAGES, Expectation, Measure, parse_expectation, sum_of
    from coranto_consumers.audit.memory import Memory
    from coranto_consumers.audit.places import FolderMemory, FragmentStoreMemory, memory_at
    from coranto_consumers.audit.recovered import RecoveredEvidence
    from coranto_consumers.audit.sources import framing_of
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

__all__ = [
    "MESSAGES",
    "ConsumerCheck",
    "Evidence",
    "EvidenceSource",
    "Expectation",
    "FolderMemory",
    "FragmentStoreMemory",
    "Measure",
    "Memory",
    "RecoveredEvidence",
    "SqlEvidence",
    "framing_of",
    "memory_at",
    "parse_expectation",
    "sum_of",
]
