"""The proxy on each host."""
