"""The frame transport: calls between Coranto's own processes, at much lower cost than gRPC."""
