"""Stand-ins for what tests cannot have: the driver and the VMM."""
