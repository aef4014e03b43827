"""The agent inside each confidential VM."""
