"""The pure model of streams: keys, segments, events, registers, positions and watermarks."""
