"""The simulated world: a clock, a network that delays and reorders, registers that answer late, and processes.

Everything random comes from one seeded generator, so a run is a pure function of its case.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.protocol.decision import Abort, Decision, Decisions, MemberId, Tag
from ringside.survive.protocol.generation import Generation, decode_generation, encode_generation, generation_key
from ringside.survive.protocol.settings import ProtocolSettings, Rules
from verification.survive.fault_injection import strike
from verification.survive.faults import Fault, Point
from verification.survive.invariants import ATTENDED, ENDS, Ledger
from verification.survive.network import Network
from verification.survive.sample_counting import Counting, Weights
from verification.survive.simulated_process import Process

T = TypeVar("T")
LIMIT_S = 15.0


@dataclass(frozen=True)
class WorldRules:
    """The rules that lie outside the state machine.

    Args:
        write_once: What is decided about a step stays.
        compare_and_set: A generation replaces only the one it was made from.
        tagged_data: A message is stored only into the memory of the attempt that it names.
    """

    write_once: bool = True
    compare_and_set: bool = True
    tagged_data: bool = True


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        seed: Of everything random.
        faults: What goes wrong.
        ranks: How many processes begin.
        model: The job.
        algorithm: Whose schedule the exchanges walk.
    """

    seed: int
    faults: tuple[Fault, ...]
    ranks: int = 4
    model: Counting = field(default_factory=Counting)
    algorithm: str = "ring"


class World:
    """All processes of one run, and what is between them.

    Args:
        case: What is run.
        rules: Those of the state machine.
        outside: Those of the world.

    Attributes:
        now: Time, seconds.
        ledger: The invariants.
        processes: Everybody who ever was, by seat.
        incarnation: The newest that was opened.
        kept: The final state by rank, where it outlives a process.
        gone: Ranks that died for good.
    """

    def __init__(self, case: Case, rules: Rules, outside: WorldRules) -> None:
        self.case, self.outside, self.model = case, outside, case.model
        self.settings = ProtocolSettings(
            micro_batches=case.model.micro_batches,
            samples=case.model.stretch,
            steps=case.model.steps,
            mean=False,
            checkpoint_every=1,
            ranks=case.ranks,
            end_patience_s=5.0,
            patience_s=0.4,
            fetch_patience_s=1.0,
            store_patience_s=5.0,
            rules=rules,
        )
        self.now = 0.0
        self.random = random.Random(case.seed)
        self.network = Network(self.random, self.after)
        self.ledger = Ledger(case.model)
        self.registers = MemoryRegisters()
        self.decisions = Decisions(self.registers, outside.write_once)
        self.processes: dict[MemberId, Process] = {}
        self.incarnation = 1
        self.kept: dict[int, Weights] = {}
        self.gone: set[int] = set()
        self._disk: list[tuple[int, int, Weights]] = [(1, 0, case.model.weights_at(0))]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._epochs: dict[int, int] = {}
        self._gathered: dict[int, list[MemberId]] = {}
        self._waiting = list(case.faults)
        self._slow_store: dict[int, float] = {}
        self._coming = 0

    # ------------------------------------------------------------------------------------------ time

    def run(self) -> Ledger:
        """Run until everybody has ended, or far too long; return what was noted."""
        for rank in range(self.case.ranks):
            self.start(rank, founder=True)
        while self._events and self.now < LIMIT_S and not self._over():
            self.now, _, call = heapq.heappop(self._events)
            call()
        done = [process for process in self.processes.values() if process.finished]
        self.ledger.holds(ENDS, self._over(), f"not all have ended after {LIMIT_S:g} s")
        self.ledger.holds(ENDS, bool(done), "nobody did the last step")
        missing = set(range(self.case.ranks)) - self.gone - {process.seat.rank for process in done}
        self.ledger.holds(ATTENDED, not missing, f"not done by {sorted(missing)}")
        return self.ledger

    def _over(self) -> bool:
        return not self._coming and not any(p.alive and not p.ended for p in self.processes.values())

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call something later."""
        self._serial += 1
        heapq.heappush(self._events, (self.now + delay_s, self._serial, call))

    def between(self, low_s: float, high_s: float) -> float:
        """Return a random time."""
        return self.random.uniform(low_s, high_s)

    # ------------------------------------------------------------------------------------------ processes

    def start(self, rank: int, founder: bool = False) -> None:
        """Start a process, which claims its rank's next epoch."""
        epoch = self._epochs.get(rank, 0) + 1
        self._epochs[rank] = epoch
        seat = MemberId(rank, epoch)
        process = Process(self, seat)
        self.processes[seat] = process
        if founder:
            self.gather(process, 1)
        else:
            process.join()

    def start_later(self, rank: int, delay_s: float) -> None:
        """Start a process of a rank some time later."""
        self._coming += 1
        self.after(delay_s, lambda: self._start_now(rank))

    def _start_now(self, rank: int) -> None:
        self._coming -= 1
        self.start(rank)

    def again(self, process: Process) -> None:
        """A process that was left out begins anew, as another one."""
        process.end()
        self._coming += 1
        self.after(self.between(0.005, 0.03), lambda: self._reborn(process))

    def _reborn(self, process: Process) -> None:
        self._coming -= 1
        if process.alive and self._epochs[process.seat.rank] == process.seat.epoch:
            self.start(process.seat.rank)

    def gather(self, process: Process, incarnation: int) -> None:
        """A process resumes from the newest checkpoint, together with whoever else does so about now."""
        self.incarnation = max(self.incarnation, incarnation)
        self.ledger.given_up(incarnation)
        if self.registers.read(generation_key(incarnation)) is not None:
            process.join()
            return
        together = self._gathered.setdefault(incarnation, [])
        together.append(process.seat)
        _, step, weights = max(self._disk, key=lambda saved: saved[:2])
        self.after(self.between(0.05, 0.08), lambda: process.found(step, weights, _newest_of_each(together)))

    def save(self, incarnation: int, step: int, weights: Weights) -> None:
        """A checkpoint is complete."""
        self._disk.append((incarnation, step, weights))

    def living(self) -> list[Process]:
        """Return the processes that nobody killed."""
        return [process for process in self.processes.values() if process.alive]

    def nobody_has_state(self) -> bool:
        """Tell whether no process that holds state gives a sign of life."""
        holders = (p for p in self.processes.values() if p.holds_state)
        return not any(p.alive and p.silent_s < 0.3 for p in holders)

    # ------------------------------------------------------------------------------------------ registers

    def slow_store(self, rank: int, late_s: float) -> None:
        """Let the next answer of a register to a rank come late."""
        self._slow_store[rank] = late_s

    def ask(self, process: Process, do: Callable[[], T], answer: Callable[[T], None]) -> None:
        """Ask a register: it does what it is asked, whatever becomes of the process, and answers later."""
        late = self._slow_store.pop(process.seat.rank, 0.0)

        def carry_out() -> None:
            found = do()
            self.after(self.between(0.0002, 0.001) + late, lambda: process.post(lambda: answer(found)))

        self.after(self.between(0.0002, 0.001), carry_out)

    def read_generation(self, incarnation: int) -> Generation | None:
        """Return what stands."""
        found = self.registers.read(generation_key(incarnation))
        return None if found is None else decode_generation(found)

    def swap_generation(self, expected: Generation | None, new: Generation) -> Generation | None:
        """Compare and set."""
        key = generation_key(new.incarnation)
        old = None if expected is None else encode_generation(expected)
        if not self.outside.compare_and_set:
            old = self.registers.read(key)
        found = self.registers.swap(key, old, encode_generation(new))
        record = None if found is None else decode_generation(found)
        if record is not None:
            self.ledger.generation(record)
        return record

    def create_decision(self, tag: Tag, decision: Decision) -> Decision:
        """Write once."""
        found = self.decisions.decide(tag, decision)
        self.ledger.decided(tag, found)
        return found

    def end_generation(self, incarnation: int, number: int, by: Abort) -> int:
        """Abort what would be decided next in a generation; return its number."""
        decided = self.decisions.end(incarnation, number, by)
        self.ledger.ended(incarnation, number, decided.abort or by)
        return number

    def read_decision(self, tag: Tag) -> Decision | None:
        """Return what stands."""
        return self.decisions.read(tag)

    # ------------------------------------------------------------------------------------------ messages

    def send(self, sender: Process, to: MemberId, take: Callable[[Process], None], by_store: bool = False) -> None:
        """Send a message to a process, if there ever was one."""
        receiver = self.processes.get(to)
        if receiver is not None:
            self.network.carry(sender.seat.rank, to.rank, lambda: receiver.post(lambda: take(receiver)), by_store)

    def tell_all(self, sender: Process, take: Callable[[Process], None]) -> None:
        """Send a message to everybody."""
        for seat in list(self.processes):
            if seat != sender.seat:
                self.send(sender, seat, take, by_store=True)

    # ------------------------------------------------------------------------------------------ faults

    def reach(self, process: Process, point: Point) -> None:
        """A process comes to a point: what was to happen to it there, happens."""
        for fault in self._waiting:
            any_step = fault.at.phase.rejoins and fault.at.phase is point.phase
            if fault.rank == process.seat.rank and (any_step or fault.at == point):
                self._waiting.remove(fault)
                strike(fault.kind, self, process)
                return

    @property
    def unstruck(self) -> tuple[Fault, ...]:
        """Faults whose point nobody came to."""
        return tuple(self._waiting)


def _newest_of_each(seats: list[MemberId]) -> tuple[MemberId, ...]:
    """Return the last process of every rank, by rank."""
    return tuple(sorted({seat.rank: seat for seat in sorted(seats)}.values()))


__all__ = ["Case", "World", "WorldRules"]
