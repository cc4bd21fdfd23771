"""The content of one append as it is streamed to the replicas: its range in the journal and its SHA-1."""

from __future__ import annotations

from coranto.effects import Bytes
from coranto.fragments.fragment import Fragment
from coranto_broker.replication.pipeline import Pipeline
from coranto_broker.spool.spool import Hash, new_sum


class StreamedContent:
    """The content that one append has sent so far: the range [begin, end) after the committed content."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Begin at the end of the pipeline's spool."""
        self._pipeline = pipeline
        self.begin = self.end = pipeline.spool.end
        # In an empty fragment, the sum that the spool computes for the fragment is also the append's sum.
        self._sum: Hash | None = new_sum() if pipeline.spool.fragment.length else None

    @property
    def length(self) -> int:
        """Length of the content in bytes."""
        return self.end - self.begin

    def write(self, content: Bytes) -> None:
        """Send content to all replicas. Failures are in the pipeline's `error`."""
        self._pipeline.write(self.length, content)
        if self._sum is not None:
            self._pipeline.spool.hash(self._sum, content)
        self.end += len(content)

    def commit(self, proposal: Fragment) -> Fragment:
        """Return the append's own fragment, given the proposal that commits it."""
        # The sum of an empty append is the SHA-1 of no bytes, unlike the sum of an empty fragment.
        digest = proposal.sum if self._sum is None and self.length else (self._sum or new_sum()).digest()
        return Fragment(proposal.journal, self.begin, self.end, digest, proposal.codec)
