"""A link's rate, as commands for `tc` and `ip`.

Each end of a link has a token bucket filter on what it sends. Limiting what the hosts send would not limit what one of
them receives from several at once; the end at the switch does.

Three sizes belong to a rate, all of them times at that rate, chosen by measurement (docs/lab.md):

- the bucket, 0.5 ms: what may go out at once after a pause. Less, and a timer that fires late costs throughput;
- the largest piece TCP hands down at once, 0.13 ms: full 64 KB pieces leave no room for the other direction's
  acknowledgements in the bucket, and cost up to half of the throughput when both directions are busy;
- the queue, 16 ms: then frames are dropped. Less, and three senders to one receiver lose throughput to losses.
"""

from __future__ import annotations

from ringside.lab.units import MTU_BYTES

_FRAME_BYTES = MTU_BYTES + 14
_BUCKET_S, _PIECE_S, _QUEUE_S = 0.5e-3, 0.13e-3, 16e-3
_MOST_PIECE_BYTES = 65536


def piece_bytes(rate: float | None) -> int:
    """Return the largest piece (GSO) TCP may hand down to a link of that rate, bit/s; None for one without a limit."""
    if rate is None:
        return _MOST_PIECE_BYTES
    return min(max(int(rate / 8 * _PIECE_S), 2 * _FRAME_BYTES), _MOST_PIECE_BYTES)


def bucket_bytes(rate: float) -> int:
    """Return how much may go out at once after a pause over a link of that rate in bit/s."""
    return max(int(rate / 8 * _BUCKET_S), 2 * piece_bytes(rate))


def queue_bytes(rate: float) -> int:
    """Return how much may wait at each end of a link of that rate in bit/s."""
    return max(int(rate / 8 * _QUEUE_S), 64 * _FRAME_BYTES)


def limit(device: str, rate: float | None) -> list[str]:
    """Return the commands for `tc` that give a device a rate in bit/s, or none.

    What waits there is dropped: a frame larger than the new bucket would stay first in the queue for ever.
    """
    unlimited = f"qdisc replace dev {device} root pfifo limit 1000"
    return [unlimited] if rate is None else [unlimited, _filter(device, rate, queue_bytes(rate))]


def drop_all(device: str) -> list[str]:
    """Return the commands for `tc` that have a device drop every frame, and tell the sender that it has left.

    A queue that is full drops too, but says so. TCP takes that for congestion of its own host: it counts no keepalive
    as unanswered, and never gives up a connection that is idle. What is lost on the way is not like that.
    """
    return [f"qdisc replace dev {device} root blackhole"]


def pieces(device: str, rate: float | None) -> list[str]:
    """Return the commands for `ip` that bound what TCP hands down to a device at once."""
    return [f"link set {device} gso_max_size {piece_bytes(rate)}"]


def _filter(device: str, rate: float, queue: int) -> str:
    return f"qdisc replace dev {device} root tbf rate {rate:.0f}bit burst {bucket_bytes(rate)} limit {queue}"
