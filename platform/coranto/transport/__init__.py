"""The frame transport: calls between Coranto's own processes that cost much less than over gRPC."""
