"""The ground floor seen from outside."""
