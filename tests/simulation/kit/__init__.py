"""The checks of simulated journals, and fakes of TCP and of disks with faults."""
