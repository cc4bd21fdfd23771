"""Publications: finite sets of messages that reach a group of journals exactly once, however often they are tried.

A publisher names its publication (`writer_id`), and uses the same name when it tries again. Each attempt appends its
messages as an open transaction of a producer of its own. The first attempt that is complete records its
acknowledgements in a *ledger*, a journal beside the group: at that moment the publication is decided, for all journals
at once and for good. Then the acknowledgements are appended. What other attempts have appended is never acknowledged,
so no reader of committed messages sees it.
"""

from coranto.publication.batch_ledger import BatchLedger, DecidedBatch
from coranto.publication.ledger import Ledger, Mark
from coranto.publication.publish import Publication, publish_once
from coranto.publication.records import Decision

__all__ = ["BatchLedger", "DecidedBatch", "Decision", "Ledger", "Mark", "Publication", "publish_once"]
