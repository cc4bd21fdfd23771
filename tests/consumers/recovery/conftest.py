"""Fixtures of the consumers' recovery: the scene of the audit's tests."""

from tests.consumers.audit.conftest import cluster, scene, store_url

__all__ = ["cluster", "scene", "store_url"]
