"""Consumers by windows of offsets, and time travel to what a materialisation has read."""
