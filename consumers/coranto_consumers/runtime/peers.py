"""Channels to the processes of a consumer, for other processes and for the command line."""

from __future__ import annotations

import grpc.aio

from coranto.client.channels import Channels
from coranto.client.config import parse_endpoint
from coranto.errors import Unavailable
from coranto.security.certificates import ChannelCertificates
from coranto.security.tls import ClientTls
from coranto.wire import consumer_pb2_grpc as pc_grpc

MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    # A token for this machine must not pass through a proxy on another.
    ("grpc.enable_http_proxy", 0),
]


class ShardPeers:
    """Channels, by endpoint."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        """`tls` is for `https` endpoints."""
        self._certificates = ChannelCertificates(tls)
        self._channels = Channels(self._open, self._credentials)

    def stub(self, endpoint: str) -> pc_grpc.ShardAsyncStub:
        """Return a stub of the process at an endpoint. Raises Unavailable for "": the process is gone."""
        if not endpoint:
            raise Unavailable("the asked process is no longer there; try again shortly")
        return pc_grpc.ShardStub(self._channels.get(endpoint))

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        target = parse_endpoint(endpoint)
        if target.secure:
            return grpc.aio.secure_channel(target.address, self._certificates.get(), options=_OPTIONS)
        return grpc.aio.insecure_channel(target.address, options=_OPTIONS)

    def _credentials(self, endpoint: str) -> grpc.ChannelCredentials | None:
        """Return the credentials for a channel to an endpoint. They change with the certificates."""
        return self._certificates.get() if endpoint.startswith("https:") else None

    async def close(self) -> None:
        await self._channels.close()
