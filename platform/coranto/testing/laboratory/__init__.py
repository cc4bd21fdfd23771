"""Experiments on real processes: start them, harm them and wait for what follows. Shared by all fault runs."""
