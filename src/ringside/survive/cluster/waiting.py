"""Waiting for members, and noticing while it lasts that one of them is dead, stopped or silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ringside.survive.cluster.peers import Peer
from ringside.survive.protocol.decision import MemberId
from ringside.survive.protocol.generation import Link

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3
_CHECK_S = 0.002
"""Between two checks of whether members live, seconds."""


class GaveUp(Exception):
    """An exchange cannot be finished.

    Args:
        suspects: Who is dead, does not answer or cannot be reached; nobody: it is not known.
        broken: The link that carries nothing though both of its ends live.
    """

    def __init__(self, *suspects: MemberId, broken: Link | None = None) -> None:
        super().__init__(", ".join(map(str, suspects)) or str(broken or "the exchange failed"))
        self.suspects = suspects
        self.broken: tuple[Link, ...] = () if broken is None else (broken,)


class Superseded(Exception):
    """The member is at something else now: what is under way leads nowhere."""


@dataclass(frozen=True)
class Patience:
    """How long what may last, seconds.

    Args:
        stopped_s: A process that somebody stopped (SIGSTOP) is given up after so long.
        silent_s: One that lives and takes no part, after so long: the longest that a rank may be later than another.
    """

    stopped_s: float = 1.0
    silent_s: float = 60.0


@dataclass
class PeerWait:
    """Waits for members of one generation.

    Args:
        peers: The other members.
        attend: Called several hundred times a second while something is waited for, with those who are dead or silent;
            it raises `Superseded` to end the wait.
        patience: When whom to give up.
        clock: Seconds.
        pause: Does nothing for so many seconds.
    """

    peers: Mapping[MemberId, Peer]
    attend: Callable[[Sequence[MemberId]], object]
    patience: Patience = Patience()
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep
    _stopped_since: dict[MemberId, float] = field(default_factory=dict)
    _dead: list[MemberId] = field(default_factory=list)
    _checked: float = -1.0

    def wait(self, late: Callable[[], Sequence[MemberId]]) -> None:
        """Return when nobody is late any more.

        Args:
            late: Returns who is.

        Raises:
            Superseded: There is nothing to wait for any more.
        """
        began = attended = self.clock()
        pause_s = 0.0
        while True:
            missing = late()
            if not missing:
                return
            now = self.clock()
            if now - attended > _CHECK_S:
                attended = now
                patient = now - began <= self.patience.silent_s
                silent = [] if patient else [seat for seat in missing if seat in self.peers]
                self.attend([*self.dead(), *silent])
            self.pause(pause_s)
            pause_s = min(max(_FIRST_PAUSE_S, 1.5 * pause_s), _LONGEST_PAUSE_S)

    def dead(self) -> list[MemberId]:
        """Return the members that are known to have ended, or were stopped for too long, as of a moment ago."""
        if self.clock() - self._checked > _CHECK_S:
            self._checked = self.clock()
            self._dead = [seat for seat in self.peers if self._is_dead(seat)]
        return self._dead

    def _is_dead(self, seat: MemberId) -> bool:
        peer, now = self.peers[seat], self.clock()
        if peer.ended():
            return True
        if not peer.stopped():
            self._stopped_since.pop(seat, None)
            return False
        return now - self._stopped_since.setdefault(seat, now) > self.patience.stopped_s
