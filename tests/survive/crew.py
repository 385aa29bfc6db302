"""A job whose ranks are threads of this process, over registers in memory: `training` itself, in a second or less.

A rank dies by an exception at a named phase (`survive/cluster/failpoints.py`). To the others it is a process, which is
killed then: a child that does nothing stands for it. Where it is told to it comes back, as a keeper would start it.
With `hosts` every rank is on a host of its own: nothing is shared, and sums and state go through transports.
"""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.thread_transport import Switchboard, Threads
from tests.survive.counting import BATCH, SAMPLES, Counting, consumed

from ringside.errors import StoreGoneError
from ringside.processes import start_time
from ringside.survive import driver, train
from ringside.survive.cluster import known_workers
from ringside.survive.cluster.failpoints import Failpoint, Failpoints
from ringside.survive.cluster.peers import Peer, PeerPlace
from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.connection import StoreConnection
from ringside.survive.job import Step
from ringside.survive.protocol.decision import Commit
from ringside.survive.state.kept import Kept
from ringside.survive.train import Training, training

LIMIT_S = 60.0


class Dies(BaseException):
    """What ends a rank at a phase."""


@dataclass
class Ended:
    """What one rank has found.

    Args:
        steps: The steps that its last process saw.
        counts: How often every sample is in its parameters, [samples].
        digest: Of its state.
        step: The next step.
        joined: Whether it came while the others trained.
        reason: Why it ended before the last step.
        committed: What `Training.committed` says; nothing where the store is gone.
    """

    steps: list[Step]
    counts: list[float]
    digest: int
    step: int
    joined: bool
    reason: str
    committed: list[Commit]


@dataclass
class Crew:
    """The ranks of one job.

    Args:
        monkeypatch: Puts threads where processes are.
        ranks: How many.
        steps: How many steps; None: without end.
        hosts: Whether every rank is on a host of its own.
        traps: Who dies where, as in RINGSIDE_SURVIVE_TRAP.
        comes_back: Whether who has died comes back.
        look: Called by every rank in the loop, with the training and the step; True: it leaves the loop.
        hook: Called by every rank with the phases it comes to.
        given: Further arguments of `training`.

    Attributes:
        ended: By rank, what it found.
        errors: By rank, how it ended if not well.
        registers: Those of the job.
        reached: By rank, the (step, phase) that its processes came to.
        kept: By rank, what stands for its keeper's memory.
    """

    monkeypatch: Any
    ranks: int = 3
    steps: int | None = 6
    hosts: bool = False
    traps: str = ""
    comes_back: bool = True
    look: Callable[[Training, Step], object] = lambda t, step: False
    hook: Callable[[int, str], object] = lambda rank, phase: None
    given: Mapping[str, Any] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    registers: MemoryRegisters = field(default_factory=MemoryRegisters)
    reached: defaultdict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    kept: Mapping[int, Kept] = field(default_factory=dict)

    def run(self) -> Crew:
        """Run the job until all its ranks have ended."""
        local, boards, guard = (
            threading.local(),
            defaultdict[str, Switchboard](lambda: Switchboard(2)),
            threading.Lock(),
        )
        crew = self

        class Shared(StoreConnection):
            def open_transport(self, name: str, end: int, wanted: Callable[[], bool]) -> Any:
                with guard:
                    return Threads(boards[name], end)

        def connect(*_: Any) -> StoreConnection:
            store = object() if self.hosts else None
            return Shared(local.rank, self.ranks, self.registers, self.registers, store)

        def laid(rank: int, _: Any) -> Failpoints:
            traps = tuple(map(Failpoint.parse, filter(None, self.traps.split(";"))))

            def spring(_: int) -> None:
                local.process.kill()
                raise Dies

            failpoints = Failpoints(rank, traps, spring)
            reached = failpoints.reached

            def noted(phase: str) -> None:
                self.reached[rank].append((failpoints.step, phase))
                self.hook(rank, phase)
                reached(phase)

            failpoints.reached = noted  # type: ignore[method-assign]
            return failpoints

        def place(life: int = 0, step: int = 0) -> PeerPlace:
            machine = f"host {local.rank}" if self.hosts else "here"
            keeper = (os.getpid(), start_time(os.getpid())) if self.comes_back else (0, 0)
            return PeerPlace(machine, local.process.pid, start_time(local.process.pid), life, step, keeper)

        def work(rank: int) -> None:
            local.rank = rank
            while rank not in self.ended and rank not in self.errors:
                with subprocess.Popen(["sleep", "1000"]) as local.process:
                    try:
                        self.ended[rank] = self._train()
                    except Dies:
                        if not self.comes_back:
                            return
                    except BaseException as error:
                        self.errors[rank] = error
                    finally:
                        local.process.kill()

        def is_this(peer: Peer) -> bool:
            return peer.here and peer.place.pid == local.process.pid

        self.monkeypatch.setattr(train, "connect", connect)
        self.monkeypatch.setattr(train, "own_job", lambda: (local.process.pid, 0, ""))
        self.monkeypatch.setattr(Peer, "is_this_process", property(is_this))
        self.monkeypatch.setattr(train.Kept, "of_environment", lambda _: self.kept.get(local.rank))
        self.monkeypatch.setattr(train.Failpoints, "of_environment", laid)
        for module in (driver, train, known_workers):
            self.monkeypatch.setattr(module, "own_place", place)
        threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "a rank has not ended"
        gc.collect()  # what those who died held
        return crew

    def _train(self) -> Ended:
        model = Counting(SAMPLES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given: dict[str, Any] = {"batch_size": BATCH, "micro_batches": 6, "mean": False, **self.given}
        seen = []
        with training(model, optimizer, range(SAMPLES), loss_fn=consumed, steps=self.steps, **given) as t:
            for step in t:
                seen.append(step)
                if self.look(t, step):
                    break
        counts = model.counts.detach().tolist()
        try:
            committed = t.committed(t.step)
        except StoreGoneError:
            committed = []
        return Ended(seen, counts, t.digest(), t.step, t.joined, t.reason, committed)


__all__ = ["Crew", "Ended"]
