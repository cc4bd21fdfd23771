"""The broker process: settings, port, lease and commands. Also a broker inside another process."""
