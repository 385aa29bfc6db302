"""The parameter server."""

from __future__ import annotations

import numpy as np

from ringside.schedule.schedule import Round, Schedule


def parameter_server(n: int) -> Schedule:
    """The parameter server: one rank adds up everything and hands it back. It grows linearly with the ranks.

    M. Li et al.: "Scaling distributed machine learning with the parameter server", OSDI 2014, with a single server.

    Return the all-reduce of `n` ranks in which rank 0 is the server.

    Round 0: everybody sends the whole tensor to rank 0, which adds in rank order; round 1: rank 0 sends the sum back.
    One chunk, 2 rounds (0 for one rank); rank 0 sends and receives n-1 tensors over n-1 ports, the others one each.
    Canonical: ((x0+x1)+x2)+...

    Raises:
        UsageError: n < 1.
    """
    return Schedule("parameter_server", n, 1, 2 if n > 1 else 0, _server_round, (n,))


def _server_round(n: int, k: int) -> Round:
    clients = np.arange(1, n, dtype=np.int32)
    server = np.zeros_like(clients)
    src, dst = (clients, server) if k == 0 else (server, clients)
    return Round(src, dst, np.zeros_like(clients), np.full(n - 1, k == 0))
