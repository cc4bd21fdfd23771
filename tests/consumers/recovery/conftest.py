"""Fixtures of the consumers' recovery tests: the scene of the audit tests."""

from tests.consumers.audit.conftest import cluster, scene, store_url

__all__ = ["cluster", "scene", "store_url"]
