"""The sample-counting model: its weights are the multiset of the samples that were trained on, in exact integers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

Weights = tuple[int, ...]


@dataclass(frozen=True)
class Counting:
    """A job that counts samples: operation sum, divisor 1, learning rate 1.

    Args:
        steps: How many.
        micro_batches: Parts of a step, of one sample each.
        buckets: Parts that the gradient is exchanged in.
    """

    steps: int = 5
    micro_batches: int = 8
    buckets: int = 2

    @property
    def samples(self) -> int:
        """Samples altogether, and parameters."""
        return self.steps * self.micro_batches

    def stretch(self, step: int) -> tuple[int, int]:
        """Return a step's samples: position of the first, and how many."""
        return step * self.micro_batches, self.micro_batches

    def gradient(self, step: int, micro_batches: Sequence[int]) -> list[int]:
        """Return the sum of gradients over some micro-batches of a step: [samples]."""
        # One parameter per sample: the gradient of a sample is the unit vector of its parameter.
        found = [0] * self.samples
        for micro_batch in micro_batches:
            found[step * self.micro_batches + micro_batch] += 1
        return found

    def weights_at(self, step: int) -> Weights:
        """Return what the weights must be when a step begins: every sample before it once."""
        done = step * self.micro_batches
        return (1,) * done + (0,) * (self.samples - done)

    def cut(self, values: Sequence[int]) -> list[list[int]]:
        """Cut a gradient into buckets."""
        size = len(values) // self.buckets
        return [list(values[b * size : (b + 1) * size]) for b in range(self.buckets)]


def apply_gradient(weights: Weights, gradient: Sequence[int]) -> Weights:
    """Make the optimizer's step."""
    return tuple(weight + part for weight, part in zip(weights, gradient, strict=True))


def digest_of(values: Sequence[int]) -> str:
    """Return the digest of weights or of a gradient."""
    return hashlib.blake2b(repr(tuple(values)).encode(), digest_size=8).hexdigest()


__all__ = ["Counting", "Weights", "apply_gradient", "digest_of"]
