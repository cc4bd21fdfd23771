"""The examples of docs/messages.md, run in their order."""

from __future__ import annotations

import re
from pathlib import Path

from coranto.testing.command_line import RemoteBroker

PAGE = Path(__file__).parents[3] / "docs" / "messages.md"


def test_the_examples_run(remote: RemoteBroker) -> None:
    for journal in ("orders/part-000", "orders/part-001", "orders-publications", "measurements"):
        remote.fake.create(journal)
    text = PAGE.read_text()
    examples = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(examples) >= 10
    names: dict[str, object] = {"endpoint": remote.fake.endpoint, "__name__": "documentation"}
    for example in examples:
        line = text.count("\n", 0, example.start(1))
        exec(compile("\n" * line + example[1], PAGE, "exec"), names)  # Errors show the page's own lines.
