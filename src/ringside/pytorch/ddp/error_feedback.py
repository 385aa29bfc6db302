"""What was rounded away of each gradient bucket on its way between hosts, added to the same bucket of the next step.

It goes with the bucket. `no_sync` reduces nothing and leaves it as it is. It begins at zero, with a word in the log,
when DDP makes its buckets anew (after the first backward, for one) and when parameters are loaded (a checkpoint); in a
process that goes on from a checkpoint it does, too, as nothing of it is saved. What is lost then is what was rounded
away in one step. Gradients that an AMP scaler multiplies are fed back in its scale of the step before.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ringside.engine.buffers import Flat
from ringside.engine.net.exchange.block_scaling import BlockScaling, ErrorFeedback

_log = logging.getLogger(__name__)

_Layout = tuple[int, ...]


class BucketErrorFeedback:
    """What is kept of a model's buckets on this rank; the other ranks need not keep the same, or anything.

    Args:
        scaling: How gradients travel between hosts.
    """

    def __init__(self, scaling: BlockScaling) -> None:
        self._scaling = scaling
        self._buckets: dict[int, tuple[_Layout, ErrorFeedback]] = {}

    def of(self, bucket: GradBucket, flat: Flat) -> ErrorFeedback:
        """Return what is kept of a bucket; of one that has other parameters than before, nothing.

        Args:
            bucket: DDP's.
            flat: Its elements, float32.
        """
        index = bucket.index()
        layout = (flat.numel, *map(id, bucket.parameters()))
        known = self._buckets.get(index)
        if known is not None and known[0] != layout:
            self.reset("DDP has made its buckets anew")
            known = None
        if known is None:
            known = self._buckets[index] = layout, ErrorFeedback(self._scaling, flat.address, flat.numel)
        feedback = known[1]
        feedback.address = flat.address  # the same parameters, in other memory
        return feedback

    @property
    def kept(self) -> list[ErrorFeedback]:
        """What is kept, by bucket."""
        return [feedback for _, feedback in self._buckets.values()]

    def reset(self, why: str) -> None:
        """Keep nothing of any bucket.

        Args:
            why: For the log.
        """
        if self._buckets:
            _log.info("error feedback of gradients begins at zero: %s", why)
        for feedback in self.kept:
            feedback.clear()
        self._buckets.clear()

    def follow(self, model: DistributedDataParallel) -> None:
        """Keep nothing whenever parameters are loaded into a model."""
        model.module.register_load_state_dict_post_hook(functools.partial(_loaded, weakref.ref(self)))


def _loaded(feedback: weakref.ref[BucketErrorFeedback], module: Any, incompatible_keys: Any) -> None:
    followed = feedback()
    if followed is not None:
        followed.reset("parameters were loaded, and no checkpoint has it")
