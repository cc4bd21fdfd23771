"""What every RPC handler stands on: messages of a stream, their errors, and deadlines of silent clients."""
