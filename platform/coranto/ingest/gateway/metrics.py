"""Prometheus metrics of gateways of webhooks."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class WebhookMetrics:
    """Metrics of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "coranto_webhook_requests", "Requests that were answered.", ["ingest", "status"], registry=registry
        )
        self.duplicates = Counter(
            "coranto_webhook_duplicates", "Requests whose key was committed before.", ["ingest"], registry=registry
        )
        self.bytes = Gauge("coranto_webhook_held_bytes", "Bytes of bodies in memory.", ["ingest"], registry=registry)
        self.keys = Gauge("coranto_webhook_keys", "Keys of requests in memory.", ["ingest"], registry=registry)
