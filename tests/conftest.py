"""What all tests share."""

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The `coranto` command configures logging for its process, and to a stream that ends with a test that runs it."""
    configured, before = structlog.is_configured(), structlog.get_config()
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    if configured:
        structlog.configure(**before)
    elif structlog.is_configured():
        structlog.reset_defaults()
    else:
        return
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
