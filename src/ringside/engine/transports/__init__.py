"""How messages travel between ranks that do not share memory: one small interface, several ways."""

from ringside.engine.transports.base import LinkError, LinkFailure, Pending, Transport

__all__ = ["LinkError", "LinkFailure", "Pending", "Transport"]
