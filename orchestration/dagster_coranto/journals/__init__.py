"""Assets for groups of journals that functions of the user publish to, and the IO manager."""
