"""Source journals: discovery, lost content, ranges, framings, and reading of ranges in columns."""
