"""Consumers by windows of offsets, and time travel to the input of a materialisation."""
