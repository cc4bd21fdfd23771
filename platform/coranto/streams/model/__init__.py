"""What a stream is: keys, segments, events, registers, positions and watermarks. Pure."""
