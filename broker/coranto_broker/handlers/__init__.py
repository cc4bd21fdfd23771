"""One module per RPC of `protocol.Journal`: what each does between its request and its response."""
