"""Source journals: discovery, lost content, ranges, framings, and columnar reading of ranges."""
