"""`FragmentStoreHealth`."""

from __future__ import annotations

from typing import Any

from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient


async def test_store_health(client: RawClient, broker_settings: BrokerSettings) -> None:
    async def health(**request: Any) -> pb.FragmentStoreHealthResponse:
        response: pb.FragmentStoreHealthResponse = await client.stub.FragmentStoreHealth(
            pb.FragmentStoreHealthRequest(**request)
        )
        validate(response)
        return response

    assert (await health(fragment_store="file:///good/")).status == pb.OK
    deletable = await health(fragment_store="file:///good/", check_delete=True, check_delete_prefix="some/folder/")
    assert deletable.status == pb.OK
    assert broker_settings.file_root is not None
    (broker_settings.file_root / "blocked").write_text("a file where a folder should be")
    bad = await health(fragment_store="file:///blocked/")
    assert bad.status == pb.FRAGMENT_STORE_UNHEALTHY
    assert "blocked" in bad.store_health_error
