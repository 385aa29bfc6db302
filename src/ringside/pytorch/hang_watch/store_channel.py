"""How the hosts of a job report their ranks to each other: over the job's store, about twice a second.

A store lives in one process, and where that is stopped its clients wait for ever: so this has a thread of its own, and
whoever looks at what it brought also sees how old it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import msgspec
from torch.distributed.distributed_c10d import Store

from ringside.monitor.hang.attribution import RankState

MAIL_S = 0.5  # between two reports
FRESH_S = 4.0  # a host whose newest report is older is taken for silent

_log = logging.getLogger(__name__)


class HostReport(msgspec.Struct, array_like=True):
    """What one host reports.

    Args:
        number: Counts up.
        episode: The number of the hang that is going on; 0: none.
        standings: Where its ranks stand.
    """

    number: int = 0
    episode: int = 0
    standings: list[RankState] = []


_encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(HostReport).decode
_texts = msgspec.msgpack.Decoder(dict[int, str]).decode


class StoreChannel:
    """One host's end; only the rank that speaks for the host sends and receives.

    Args:
        store: A part of the job's store of the watch's own.
        host: Number of this host.
        ranks: Ranks of each host.

    Attributes:
        host: Number of this host.
    """

    def __init__(self, store: Store, host: int, ranks: Sequence[Sequence[int]]) -> None:
        self._store, self.host, self._ranks = store, host, ranks
        self._guard = threading.Lock()
        self._own: HostReport | None = None
        self._stacks: list[tuple[int, dict[int, str]]] = []
        self._heard: dict[int, tuple[float, HostReport]] = {}  # by host: when it came, and what
        self._answered = self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringside-watch-mail", daemon=True)
        self._thread.start()

    def post(self, standings: list[RankState], episode: int) -> None:
        """Report from now on, until the next call, that the ranks of this host stand so."""
        with self._guard:
            number = self._own.number + 1 if self._own is not None else 1
            self._own = HostReport(number, episode, standings)

    def announce(self, episode: int) -> None:
        """Report with the next message which hang is going on; 0: none."""
        with self._guard:
            if self._own is not None:
                self._own = HostReport(self._own.number + 1, episode, self._own.standings)

    def post_stacks(self, episode: int, texts: dict[int, str]) -> None:
        """Hand the stacks of this host's ranks to the host that speaks for the job."""
        with self._guard:
            self._stacks.append((episode, texts))

    def speaker(self, now: float) -> int:
        """Return the number of the host that speaks for the job: the first one that is heard of."""
        with self._guard:
            fresh = (h for h in range(self.host) if h in self._heard and now - self._heard[h][0] < FRESH_S)
            return next(fresh, self.host)

    def episode(self, host: int) -> int:
        """Return the number of the hang that a host reports; 0: none."""
        with self._guard:
            return self._heard[host][1].episode if host in self._heard else 0

    def others(self, now: float) -> list[RankState]:
        """Return where the ranks of the other hosts stand, as far as was heard; what is old is silent."""
        with self._guard:
            heard = dict(self._heard)
        standings: list[RankState] = []
        for host, ranks in enumerate(self._ranks):
            if host == self.host:
                continue
            if host in heard:
                at, report = heard[host]
                standings += [_age(standing, now - at) for standing in report.standings]
            else:
                standings += [
                    RankState(rank=rank, entered=-1, still_s=now - self._began, silent_s=now - self._began)
                    for rank in ranks
                ]
        return standings

    def silence_s(self, now: float) -> float:
        """Return for how long the store has not answered, seconds."""
        return now - self._answered

    def stacks(self, episode: int, limit_s: float) -> dict[int, str]:
        """Return the stacks that the other hosts hand over for a hang; what comes late is left out."""
        deadline, texts = time.monotonic() + limit_s, {}
        missing = {host for host in range(len(self._ranks)) if host != self.host}
        while missing and time.monotonic() < deadline and self.silence_s(time.monotonic()) < FRESH_S:
            for host in sorted(missing):
                key = f"stacks/{episode}/{host}"
                if self._store.check([key]):
                    texts.update(_texts(self._store.get(key)))
                    missing.discard(host)
            if self._ended.wait(0.1):
                break
        return texts

    def close(self) -> None:
        """Stop; a thread that waits for a store which does not answer is left behind."""
        self._ended.set()
        self._thread.join(0.5)

    def _run(self) -> None:
        try:
            while not self._ended.wait(MAIL_S):
                # What this host has to report; a call may take for ever, so no lock is held in it.
                with self._guard:
                    own, stacks, self._stacks = self._own, self._stacks, []
                if own is not None:
                    self._store.set(f"host/{self.host}", _encode(own))  # type: ignore[arg-type]  # bytes, as they are
                for episode, texts in stacks:
                    self._store.set(f"stacks/{episode}/{self.host}", _encode(texts))  # type: ignore[arg-type]
                # Read the hosts before this one until one is heard of; where there is none, this host speaks: read all.
                now = time.monotonic()
                if not any(self._read(host) and now - self._heard[host][0] < FRESH_S for host in range(self.host)):
                    for host in range(self.host + 1, len(self._ranks)):
                        self._read(host)
                self._answered = time.monotonic()
        except Exception as error:
            if not self._ended.is_set():
                _log.info("the hang watch receives nothing from other hosts any more (%s)", error)

    def _read(self, host: int) -> bool:
        key = f"host/{host}"
        if not self._store.check([key]):
            return False
        report = decode_report(self._store.get(key))
        with self._guard:
            if host not in self._heard or report.number != self._heard[host][1].number:
                self._heard[host] = (time.monotonic(), report)
        return True


def _age(standing: RankState, age_s: float) -> RankState:
    """Return a rank's state after so many seconds in which nothing was heard; its kernel cannot be asked."""
    old = age_s > FRESH_S
    process = msgspec.structs.replace(standing.process, state="") if old else standing.process
    return msgspec.structs.replace(
        standing,
        waiting_s=standing.waiting_s + age_s if standing.waiting_s and not old else standing.waiting_s,
        still_s=standing.still_s + age_s,
        silent_s=standing.silent_s + age_s if not old else max(age_s, standing.silent_s),
        process=process,
    )
