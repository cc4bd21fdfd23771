"""The HTTP gateway of a broker, for clients without gRPC."""
