"""Stubs generated from proto/ by `make proto`; a test regenerates and compares them."""
