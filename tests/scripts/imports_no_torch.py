"""The engine and the command line, without torch and without what only extras bring."""

from __future__ import annotations

import importlib
import sys

EXTRAS = ("textual", "starlette", "uvicorn", "prometheus_client", "shtab", "anywidget", "pynvml")
sys.modules.update(dict.fromkeys(EXTRAS))  # importing any of them fails

for name in ("commands", "engine", "monitor", "schedule"):
    importlib.import_module(f"ringside.{name}")

importlib.import_module("ringside.commands").build_parser()
assert "torch" not in sys.modules
