"""Where a job is in its samples: what a checkpoint says of that, and who may go on from it.

A step is a number in a sequence of samples. With another batch, seed, data set or order the same number means another
place, so that samples would be lost and others counted twice. The number of ranks and micro-batches does not matter. Of
a data set only its length and the order can be compared, not what its samples are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ringside.errors import MismatchError
from ringside.survive.data.samples import Samples

COMPARED = ("the batch", "the data set", "the seed", "an epoch")
"""What of a passport must be the same to go on from a checkpoint."""


class Saved(msgspec.Struct, frozen=True):
    """What a checkpoint says.

    Args:
        passport: What the worker was that wrote it, by name.
        epoch: The epoch of the next sample.
        sample: Its place in that epoch.
        ordered: The epoch whose order is told: that of the last sample trained on.
        order: Digest of that order; "": there is none yet.
    """

    passport: dict[str, str]
    epoch: int
    sample: int
    ordered: int
    order: str


class Position:
    """Where this worker's job is in its samples.

    Args:
        passport: What this worker is, by name.
        samples: Which samples belong to which step.
    """

    def __init__(self, passport: Mapping[str, str], samples: Samples) -> None:
        self._passport, self._samples = dict(passport), samples

    def before(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint says whose next step is `step`, as plain values."""
        samples = self._samples
        epoch, at = divmod(step, samples.steps_per_epoch)
        ordered = samples.epoch_of(max(step - 1, 0))
        order = samples.order_digest(ordered) if step else ""
        saved = Saved(self._passport, epoch, at * samples.batch, ordered, order)
        plain: dict[str, Any] = msgspec.to_builtins(saved)
        return plain

    def refuse_others(self, stated: Any) -> None:
        """Raise `MismatchError`, with what differs, unless this job may go on from what a checkpoint says."""
        try:
            saved = msgspec.convert(stated, Saved)
        except msgspec.ValidationError as error:
            raise MismatchError(f"the checkpoint does not say where it is in the samples ({error})") from None
        told = {what: (self._passport.get(what), saved.passport.get(what)) for what in COMPARED}
        different = [f"{what} ({here} here, {there} there)" for what, (here, there) in told.items() if here != there]
        if not different and saved.order and (here := self._samples.order_digest(saved.ordered)) != saved.order:
            different = [f"the order of epoch {saved.ordered} (digest {here} here, {saved.order} there)"]
        if different:
            raise MismatchError(
                f"this job differs from its checkpoint in {'; '.join(different)}: samples would be lost and others "
                "counted twice. Start it as it was, or give it another checkpoint_dir"
            )


__all__ = ["COMPARED", "Position", "Saved"]
