"""The checks of simulated journals, and twins of TCP and of disks that fail."""
