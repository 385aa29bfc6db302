"""Messages of a byte that show whether a connection stands: what is not acknowledged ends one that is silent.

They are taken, or Gloo would keep a note of each at both ends.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

_TAG = 3


class Probes:
    """One rank's probes of its connections, and what it takes of the peers'. One thread takes; any may send.

    Args:
        group: A Gloo group, in which nothing else has this tag.
        rank: This vertex.
        size: Number of vertices.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._byte = torch.ones(1, dtype=torch.uint8)
        self._come = np.zeros(size, dtype=np.uint8)
        self._works: dict[int, Any] = {}
        for peer in range(size):
            if peer != rank:
                self._post(peer)

    def send(self, peer: int) -> bool:
        """Send one; False: the connection is known to be broken."""
        try:
            self._group.send([self._byte], peer, _TAG)
        except RuntimeError:
            return False
        return True

    def take(self) -> None:
        """Take what has come."""
        if self._come.any():
            for peer in np.flatnonzero(self._come).tolist():
                self._come[peer] = 0
                self._post(peer)

    def _post(self, peer: int) -> None:
        with contextlib.suppress(RuntimeError):  # whoever waits for the peer hears of it
            self._works[peer] = self._group.recv([torch.from_numpy(self._come[peer : peer + 1])], peer, _TAG)


__all__ = ["Probes"]
