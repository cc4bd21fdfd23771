"""The basis of all RPC handlers: the messages of a stream, their errors, and the deadlines of silent clients."""
