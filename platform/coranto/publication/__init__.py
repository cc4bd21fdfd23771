"""Publications: finite sets of messages that reach a group of journals exactly once, even after several attempts.

A publisher names its publication (`writer_id`), and uses the same name when it retries. Each attempt appends its
messages as an open transaction under its own producer id. The first complete attempt records its acknowledgements in a
*ledger*, a separate journal: this decides the publication, permanently and for all journals together. Then the
acknowledgements are appended. Messages of other attempts are never acknowledged, so no reader of committed messages
sees them.
"""

from coranto.publication.batch_ledger import BatchLedger, DecidedBatch
from coranto.publication.ledger import Ledger, Mark
from coranto.publication.publish import Publication, publish_once
from coranto.publication.records import Decision

__all__ = ["BatchLedger", "DecidedBatch", "Decision", "Ledger", "Mark", "Publication", "publish_once"]
