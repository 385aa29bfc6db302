"""Hugging Face Trainer: `trainer.add_callback(RingsideCallback())`."""

from __future__ import annotations

from typing import Any

from ringside.integrations import package
from ringside.integrations.models import ModelHolder, wrapper_of

TrainerCallback: Any = package("transformers").TrainerCallback


class RingsideCallback(ModelHolder, TrainerCallback):  # type: ignore[misc]
    """Synchronises and watches what a `transformers.Trainer` trains, with its tokens (or samples) and its loss.

    On one process nothing happens. Of a model that is sharded (FSDP, DeepSpeed) the process groups are watched, as by
    `ringside.watch`, where torch shows them.

    Arguments and `attachment` as of `ModelHolder`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the model: the trainer has wrapped it by now, and shows only what is inside.

        Raises:
            UsageError: As `ringside.attach`.
        """
        self.attach_model(kwargs["model"], wrapper_of(kwargs["model"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the loss to the step that just ended: the mean since the trainer logged last, over all ranks."""
        loss = (logs or {}).get("loss")
        if self.attachment is not None and self.attachment.session is not None and loss is not None:
            self.attachment.session.log(loss=float(loss))
