"""Consumers by windows of offsets, and time travel to the content that a materialisation has read."""
