"""Tests: the same rooms, seen from outside."""
