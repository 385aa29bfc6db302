"""Hugging Face Trainer: `trainer.add_callback(RingsideCallback())`."""

from __future__ import annotations

import os
from typing import Any

from ringside.integrations.models import hold, say_why_not, wrapper_of
from ringside.integrations.needs import package
from ringside.sync import Attachment

TrainerCallback: Any = package("transformers").TrainerCallback


class RingsideCallback(TrainerCallback):  # type: ignore[misc]
    """Synchronises and watches what a `transformers.Trainer` trains, with its tokens (or samples) and its loss.

    On one process nothing happens; a model that is sharded (FSDP, DeepSpeed) is left alone, which is said once.

    Args:
        engine, run_dir, digest_every: As of `ringside.attach`.

    Attributes:
        attachment: Ringside's hold on the model while and after it is trained; None before, and where there is none.
    """

    def __init__(
        self,
        *,
        engine: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        digest_every: int | None = None,
    ) -> None:
        self._wishes: dict[str, Any] = {"engine": engine, "run_dir": run_dir, "digest_every": digest_every}
        self.attachment: Attachment | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the model: the trainer has wrapped it by now, and shows only what is inside.

        Raises:
            UsageError: As `ringside.attach`.
        """
        model = kwargs["model"]
        ddp = wrapper_of(model)
        if ddp is None:
            say_why_not(model)
            return
        self.attachment = hold(ddp, **self._wishes)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the loss to the step that just ended: the mean since the trainer logged last, over all ranks."""
        loss = (logs or {}).get("loss")
        if self.attachment is not None and self.attachment.session is not None and loss is not None:
            self.attachment.session.log(loss=float(loss))
