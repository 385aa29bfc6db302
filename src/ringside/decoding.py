"""Bytes from outside that are not of the form they should have."""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding them may raise: they are not of that form, no text (or no number of that size), or nested too deep."""
