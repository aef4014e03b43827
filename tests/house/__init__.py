"""The rules that no single room can keep by itself."""
