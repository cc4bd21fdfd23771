"""Memory of a consumer's audits in a fragment store, with its SHA-256 at brokers (`coranto.audit.witness`).

The SHA-256 reveals a deleted or restored memory. Concurrent audits write the same file, so any of their contents
may be the last.
"""

from __future__ import annotations

from coranto.audit.witness import Statement, Witness, WitnessedFile, sum_of, update_statement
from coranto.errors import CorruptData
from coranto_consumers.audit.memory import Memory

_KEPT_ANNOUNCED = 8
"""The maximum number of unconfirmed contents that stay announced. Their audits may have died."""


class WitnessedMemory:
    """The memory of one consumer. `load` compares the content with the witness; `save` replaces it unconditionally."""

    def __init__(self, memory: Memory, witness: Witness) -> None:
        self.url = memory.url
        self._memory = memory
        self._witness = witness
        self._seen: str | None = None

    async def load(self, name: str) -> bytes | None:
        """Return the content. Raises CorruptData if it contradicts the witness."""
        statement = await self._witness.read()
        content = await self._memory.load(name)
        while (again := await self._witness.read()) != statement:  # Another audit is saving.
            statement, content = again, await self._memory.load(name)
        self._seen = sum_of(content) if content is not None else None
        if statement is not None:
            self._check(statement)
        return content

    def _check(self, statement: Statement) -> None:
        problem = ""
        saved = any(each.written for each in statement.files)
        if statement.damage:
            problem = f"the brokers' note of it cannot be believed: {statement.damage}"
        elif self._seen is None and saved:
            problem = "it is gone"
        elif self._seen is not None and saved and self._seen not in statement.names:
            problem = "it was changed, or an earlier one was put back"
        if problem:
            raise CorruptData(
                f"the memory of audits in {self.url} contradicts what brokers know of it: {problem}. Restore it from a "
                "copy; if there is none, accept the consumer as it is (coranto consumer audit --accept)"
            )

    async def save(self, name: str, content: bytes) -> None:
        """Replace the loaded content with `content`."""
        file = WitnessedFile(sum_of(content), sum_of(content))
        before = await self._witness.read()
        if before is None:
            await self._memory.save(name, content)
            return
        await update_statement(self._witness, lambda now: now.announced("", file))
        await self._memory.save(name, content)
        announced = [each.name for each in before.files if not each.written and each.name != self._seen]
        replaced = before.names - set(announced[-_KEPT_ANNOUNCED:])
        await update_statement(self._witness, lambda now: now.confirmed(file, replaced))
