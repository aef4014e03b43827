"""The fleet's history: polls every CVM through the VMMs and keeps what they say."""
