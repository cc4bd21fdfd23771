"""Assets for groups of journals that users' functions publish to, and the IO manager."""
