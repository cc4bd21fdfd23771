"""The common parts of RPC handlers: messages of streams, their errors, and the deadlines of silent clients."""
