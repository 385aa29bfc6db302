"""Lightning (the package `pytorch_lightning`): found by itself, or `Trainer(callbacks=[RingsideCallback()])`."""

from __future__ import annotations

from typing import Any

from ringside.integrations import package
from ringside.integrations.lightning_hooks import Automatic, LightningHooks, is_automatic

Callback: Any = package("pytorch_lightning").Callback


class RingsideCallback(LightningHooks, Callback):  # type: ignore[misc]
    """`LightningHooks` as a callback for a script: `RingsideCallback(engine=None, run_dir=None, digest_every=None)`."""


class AutomaticCallback(Automatic, Callback):  # type: ignore[misc]
    """The callback that Lightning finds by itself: gives way to one in the script, and never ends a training."""


def callbacks() -> list[Any]:
    """Return what every `Trainer` gets: Lightning asks the entry points of `pytorch_lightning.callbacks_factory`."""
    return [AutomaticCallback()] if is_automatic() else []
