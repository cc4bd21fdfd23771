"""The frame transport: calls between Coranto's own processes that cost a fraction of what they do over gRPC."""
