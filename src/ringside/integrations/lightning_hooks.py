"""What our callback does when a Lightning trainer calls it; the two packages of that name differ only in its base."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from ringside.integrations.models import ModelHolder, ddp_of

_log = logging.getLogger(__name__)


class LightningHooks(ModelHolder):
    """Synchronises and watches what a Lightning `Trainer` fits by DDP, with its tokens or samples and its loss.

    On one process nothing happens. Of a model that is sharded (FSDP, DeepSpeed) the process groups are watched, as by
    `ringside.watch`, where torch shows them.

    Arguments and `attachment` as of `ModelHolder`.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the model, which the strategy has wrapped by now.

        Raises:
            UsageError: As `ringside.attach`.
        """
        self.attach_model(trainer.strategy.model, ddp_of(trainer.strategy.model))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the loss to the step; on a GPU, where reading it means waiting, only as often as Lightning logs."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.attachment is None or self.attachment.session is None or not isinstance(loss, torch.Tensor):
            return
        if loss.numel() != 1 or (loss.is_cuda and trainer.global_step % max(trainer.log_every_n_steps, 1)):
            return
        # Lightning has divided it by the number of micro-batches, where it does the optimization itself.
        parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self.attachment.session.log(loss=loss.item() * parts)


class Automatic(LightningHooks):
    """The callback that Lightning finds by itself: gives way to one in the script, and never ends a training."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the model, unless the script's own callback does."""
        first = next(callback for callback in trainer.callbacks if isinstance(callback, LightningHooks))
        # The script's own callback, with its own arguments, comes first; and of ours one is enough.
        is_in_script = any(isinstance(c, LightningHooks) and not isinstance(c, Automatic) for c in trainer.callbacks)
        if is_in_script or first is not self or ddp_of(trainer.strategy.model) is None:
            return
        try:
            super().on_fit_start(trainer, pl_module)
        except Exception as error:
            level = logging.WARNING if trainer.global_rank == 0 else logging.DEBUG
            _log.log(level, "this training is not watched (%s: %s); it goes on", type(error).__name__, error)


def is_automatic() -> bool:
    """Tell whether Lightning's trainers get the callback by themselves: not with RINGSIDE=off."""
    return os.environ.get("RINGSIDE", "").lower() not in ("off", "0")
