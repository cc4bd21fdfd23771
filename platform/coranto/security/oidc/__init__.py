"""OpenID Connect: tokens of a provider, for servers that accept them and clients that get them."""
