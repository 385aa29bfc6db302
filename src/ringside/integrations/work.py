"""How much work a batch is: tokens where it shows them, else samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ringside.pytorch import Attachment
from ringside.pytorch.isolation import Fuse

TOKENS = "input_ids"
"""What Hugging Face calls a batch's tokens."""


def work_of(*given: Any) -> int:
    """Return the tokens of a batch, padding included, since that is computed, too; without tokens its samples.

    Args:
        given: What a model is called with: tensors, or mappings and sequences of them however nested. Tokens are a
            mapping's integer tensor `input_ids`, [samples, tokens]; samples are the first dimension of the first tensor
            that has one.

    Returns:
        The number; 0 where there is no tensor.
    """
    samples = 0
    for name, tensor in _tensors("", given):
        if name == TOKENS:
            return tensor.numel()
        samples = samples or tensor.shape[0]
    return samples


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(str(key), inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(name, inner)


class WorkCount:
    """Tells a session how much work every step of a model is, summed over its micro-batches.

    Args:
        attachment: Ringside's hold on the model.

    Attributes:
        count: Told what the model is called with; never raises.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._session = attachment.session
        self._step, self._sum = -1, 0
        self.count = Fuse("counting the work of this rank's batches").guard(self._count)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self._session
        if session is None or not torch.is_grad_enabled():
            return
        if session.clock.step != self._step:
            self._step, self._sum = session.clock.step, 0
        self._sum += work_of(args, kwargs)
        if self._sum:
            session.log(samples=self._sum)
