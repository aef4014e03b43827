"""Who may call over TCP: see gpuwire.access, which the aggregator's listener shares."""

from gpuwire.access import Tokens, guard, server_tls

__all__ = ["Tokens", "guard", "server_tls"]
