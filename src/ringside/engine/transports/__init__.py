"""How messages travel between ranks that do not share memory: one small interface, several ways."""

from ringside.engine.transports.base import Cause, LinkError, Pending, Transport

__all__ = ["Cause", "LinkError", "Pending", "Transport"]
