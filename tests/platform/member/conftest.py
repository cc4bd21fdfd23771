"""The real etcd of the tests of coordination."""

from tests.platform.coordination.conftest import coordinator, etcd, layout

__all__ = ["coordinator", "etcd", "layout"]
