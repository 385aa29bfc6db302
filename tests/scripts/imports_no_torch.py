"""The engine and the command line, without torch."""

from __future__ import annotations

import sys

import ringside.commands
import ringside.engine
import ringside.monitor
import ringside.schedule

ringside.commands.build_parser()
assert "torch" not in sys.modules
