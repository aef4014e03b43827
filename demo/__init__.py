"""`make demo`: the whole journey of a sample on one machine, with simulated cards where there are no real ones."""
