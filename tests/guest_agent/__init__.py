"""The guest agent seen from outside."""
