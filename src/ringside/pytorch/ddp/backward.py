"""What Ringside follows of one model's backward, whether it reduces the gradients itself or only watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringside.engine.runtime.interrupts import ctrl_c
from ringside.isolation import Guard
from ringside.monitor.step_clock import StepClock
from ringside.pytorch.hang_watch.board import NoBoard, ProgressPage


class FollowedBackward:
    """One model's backward: reported to the step clock and the hang watch, and not broken off by Ctrl-C.

    Args:
        clock: Informed when backward and synchronisation end.

    Attributes:
        board: Where the hang watch reads what is handed over and waited for.
        guard: Keeps what breaks in the clock away from training; the session's, where there is one.
        backwards: Backward passes whose gradients were synchronised: the same number on all ranks.
        abort_reason: Why this model's gradients are reduced no more; "": they are.
        is_unfinished: DDP has not ended a backward that failed.
    """

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.board: ProgressPage | NoBoard = NoBoard()
        self.guard = Guard("timing the steps of this rank")
        self.backwards = 0
        self.abort_reason, self.is_unfinished = "", False
        self._board_guard = Guard("the hang watch of this rank")
        # Of the backward under way: whether `ctrl_c` expects it, and has seen it begin.
        self._expects = self._begun = False

    def stop(self, group: dist.ProcessGroup, clock: StepClock) -> None:
        """Watch no longer, and leave the gradients to the group.

        Args:
            group: The model's.
            clock: One that nobody reads.
        """
        self.clock, self.board = clock, NoBoard()

    def forward_begins(self, syncs: bool) -> None:
        """Raise Ctrl-C that came in a backward that something else has broken off.

        Args:
            syncs: Gradients are synchronised in its backward (not inside `no_sync`).

        Raises:
            KeyboardInterrupt: It came.
        """
        if self._begun and self._end_backward():
            raise KeyboardInterrupt

    def forward_ends(self, output: Any, syncs: bool) -> None:
        """From now on Ctrl-C may come in backward.

        Args:
            output: What the forward pass has returned.
            syncs: As of `forward_begins`.
        """
        if not self._expects and torch.is_grad_enabled():
            self._expects = True
            ctrl_c.expect()

    def _begin_backward(self) -> None:
        """Hold Ctrl-C back."""
        if not self._begun:
            self._begun = True
            if not self._expects:  # its forward was called before Ringside was attached, or it has two backwards
                self._expects = True
                ctrl_c.expect()
            ctrl_c.begin()

    def _end_backward(self) -> bool:
        """Hold Ctrl-C back no longer; return whether `KeyboardInterrupt` has to be raised."""
        begun, self._begun, self._expects = self._begun, False, False
        return ctrl_c.end(begun=begun)


def queue_callback(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call back when backward has no work left, after what was queued before."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False  # there is no backward: DDP marks unused parameters before one begins
    return True
