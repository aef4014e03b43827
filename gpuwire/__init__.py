"""The ground floor: only what two of guest_agent, host_proxy and aggregator must agree on."""
