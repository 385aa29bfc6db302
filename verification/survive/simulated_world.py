"""The simulated world: a clock, a network that delays and reorders, registers that answer late, and processes.

Everything random comes from one seeded generator, so a run is a pure function of its case.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.protocol.decision import Abort, Decision, Decisions, MemberId, Tag, decisions_key, encode
from ringside.survive.protocol.generation import Generation, decode_generation, generation_key
from ringside.survive.protocol.settings import ProtocolSettings
from verification.survive.broken_rules import Rules
from verification.survive.faults import Fault, Kind, Point
from verification.survive.invariants import ATTENDED, ENDS, Invariants
from verification.survive.sample_counting import Counting, Weights

T = TypeVar("T")


class Actor(Protocol):
    """What the world knows of a simulated process."""

    @property
    def seat(self) -> MemberId:
        """Who it is."""

    @property
    def alive(self) -> bool:
        """Whether nobody killed it."""

    @property
    def ended(self) -> bool:
        """Whether its state machine is at an end."""

    @property
    def finished(self) -> bool:
        """Whether it has done the last step, and what its script does then."""

    @property
    def silent_s(self) -> float:
        """For how long it has given no sign of life, seconds."""

    @property
    def holds_state(self) -> bool:
        """Whether it is a member with state."""

    def join(self) -> None:
        """Begin without state."""

    def found(self, step: int, weights: Weights, founders: tuple[MemberId, ...]) -> None:
        """Begin with the state of a checkpoint."""

    def post(self, action: Callable[[], None]) -> None:
        """Do something now, or when it wakes up."""

    def end(self) -> None:
        """Do nothing any more."""


P = TypeVar("P", bound=Actor)
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


class Network:
    """What is between processes.

    Args:
        chance: Gives delays.
        after: Calls something so many seconds later.
    """

    def __init__(self, chance: random.Random, after: Callable[[float, Callable[[], None]], None]) -> None:
        self._chance, self._after = chance, after
        self._lost: Counter[int] = Counter()
        self._late: Counter[int] = Counter()
        self._cut: set[tuple[int, int]] = set()

    def lose_next_of(self, rank: int) -> None:
        """Lose the next message that a rank sends."""
        self._lost[rank] += 1

    def delay_next_of(self, rank: int) -> None:
        """Delay the next message that a rank sends, perhaps until others have given up waiting for it."""
        self._late[rank] += 1

    def cut(self, src: int, dst: int) -> None:
        """From now on the connection carries nothing in this direction; neither end is told."""
        self._cut.add((src, dst))

    def is_cut(self, src: int, dst: int) -> bool:
        """Tell whether a connection carries nothing any more."""
        return (src, dst) in self._cut

    def deliver(self, src: int, dst: int, receive: Callable[[], None], by_store: bool = False) -> None:
        """Deliver a message from rank to rank, by their connection or by the store."""
        if _one_of(self._lost, src) or (not by_store and self.is_cut(src, dst)):
            return
        late = self._chance.uniform(0.3, 1.5) if _one_of(self._late, src) else 0.0
        self._after(self._chance.uniform(0.0005, 0.002) + late, receive)


def _one_of(left: Counter[int], rank: int) -> bool:
    """Tell whether there is one left, and take it."""
    found = left[rank] > 0
    left[rank] -= found
    return found


class World(Generic[P]):
    """All processes of one run, and what is between them.

    Args:
        case: What is run.
        rules: Those of the state machine.
        outside: Those of the world.
        make_process: Makes a process of this world.
        strike: Lets a kind of fault happen to a process of this world.

    Attributes:
        now: Time, seconds.
        invariants: What must hold, and what was broken.
        processes: Everybody who ever was, by seat.
        incarnation: The newest that was opened.
        kept: The final state by rank, where it outlives a process.
        gone: Ranks that died for good.
    """

    def __init__(
        self,
        case: Case,
        rules: Rules,
        outside: WorldRules,
        make_process: Callable[[World[P], MemberId], P],
        strike: Callable[[Kind, World[P], P], None],
    ) -> None:
        self.case, self.rules, self.outside, self.model = case, rules, outside, case.model
        self._make_process, self._strike = make_process, strike
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
        )
        self.now = 0.0
        self.random = random.Random(case.seed)
        self.network = Network(self.random, self.after)
        self.invariants = Invariants(case.model)
        self.registers = MemoryRegisters()
        self.decisions = Decisions(self.registers)
        self.processes: dict[MemberId, P] = {}
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

    def run(self) -> Invariants:
        """Run until everybody has ended, or far too long; return what was noted."""
        for rank in range(self.case.ranks):
            self.start(rank, founder=True)
        while self._events and self.now < LIMIT_S and not self._over():
            self.now, _, call = heapq.heappop(self._events)
            call()
        done = [process for process in self.processes.values() if process.finished]
        self.invariants.holds(ENDS, self._over(), f"not all have ended after {LIMIT_S:g} s")
        self.invariants.holds(ENDS, bool(done), "nobody did the last step")
        missing = set(range(self.case.ranks)) - self.gone - {process.seat.rank for process in done}
        self.invariants.holds(ATTENDED, not missing, f"not done by {sorted(missing)}")
        return self.invariants

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
        process = self._make_process(self, seat)
        self.processes[seat] = process
        if founder:
            self.gather(process, 1)
        else:
            process.join()

    def start_later(self, rank: int, delay_s: float) -> None:
        """Start a process of a rank some time later."""
        self._coming += 1

        def start_now() -> None:
            self._coming -= 1
            self.start(rank)

        self.after(delay_s, start_now)

    def again(self, process: P) -> None:
        """A process that was left out begins anew, as another one."""
        process.end()
        self._coming += 1

        def start_anew() -> None:
            self._coming -= 1
            if process.alive and self._epochs[process.seat.rank] == process.seat.epoch:
                self.start(process.seat.rank)

        self.after(self.between(0.005, 0.03), start_anew)

    def gather(self, process: P, incarnation: int) -> None:
        """A process resumes from the newest checkpoint, together with whoever else does so about now."""
        self.incarnation = max(self.incarnation, incarnation)
        self.invariants.given_up(incarnation)
        if self.registers.read(generation_key(incarnation)) is not None:
            process.join()
            return
        together = self._gathered.setdefault(incarnation, [])
        together.append(process.seat)
        _, step, weights = max(self._disk, key=lambda saved: saved[:2])

        def found() -> None:  # later: others may have come together with it by then
            newest = {seat.rank: seat for seat in sorted(together)}  # the last process of every rank
            process.found(step, weights, tuple(sorted(newest.values())))

        self.after(self.between(0.05, 0.08), found)

    def save(self, incarnation: int, step: int, weights: Weights) -> None:
        """A checkpoint is complete."""
        self._disk.append((incarnation, step, weights))

    def living(self) -> list[P]:
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

    def ask(self, process: P, do: Callable[[], T], answer: Callable[[T], None]) -> None:
        """Ask a register: it does what it is asked, whatever becomes of the process, and answers later."""
        late = self._slow_store.pop(process.seat.rank, 0.0)

        def execute() -> None:
            result = do()
            self.after(self.between(0.0002, 0.001) + late, lambda: process.post(lambda: answer(result)))

        self.after(self.between(0.0002, 0.001), execute)

    def read_generation(self, incarnation: int) -> Generation | None:
        """Return what stands."""
        return decode_generation(self.registers.read(generation_key(incarnation)))

    def swap_generation(self, expected: Generation | None, new: Generation) -> Generation | None:
        """Compare and set."""
        key = generation_key(new.incarnation)
        old = None if expected is None else encode(expected)
        if not self.outside.compare_and_set:
            old = self.registers.read(key)
        found = self.registers.swap(key, old, encode(new))
        record = decode_generation(found)
        if record is not None:
            self.invariants.generation(record)
        return record

    def create_decision(self, tag: Tag, decision: Decision) -> Decision:
        """Write once."""
        if not self.outside.write_once:
            self.registers.values.pop(decisions_key(tag.incarnation, tag.generation), None)
        found = self.decisions.decide(tag, decision)
        self.invariants.decided(tag, found)
        return found

    def end_generation(self, incarnation: int, number: int, by: Abort) -> int:
        """Abort what would be decided next in a generation; return its number."""
        if not self.outside.write_once:
            self.registers.values.pop(decisions_key(incarnation, number), None)
        self.decisions.end(incarnation, number, by)
        self.invariants.ended(incarnation, number, by)
        return number

    def read_decision(self, tag: Tag) -> Decision | None:
        """Return what stands."""
        return self.decisions.read(tag)

    # ------------------------------------------------------------------------------------------ messages

    def send(self, sender: P, to: MemberId, receive: Callable[[P], None], by_store: bool = False) -> None:
        """Send a message to a process, if there ever was one."""
        receiver = self.processes.get(to)
        if receiver is not None:
            self.network.deliver(sender.seat.rank, to.rank, lambda: receiver.post(lambda: receive(receiver)), by_store)

    def tell_all(self, sender: P, receive: Callable[[P], None]) -> None:
        """Send a message to everybody."""
        for seat in list(self.processes):
            if seat != sender.seat:
                self.send(sender, seat, receive, by_store=True)

    # ------------------------------------------------------------------------------------------ faults

    def reach(self, process: P, point: Point) -> None:
        """A process comes to a point: what was to happen to it there, happens."""
        for fault in self._waiting:
            any_step = fault.at.phase.rejoins and fault.at.phase is point.phase
            if fault.rank == process.seat.rank and (any_step or fault.at == point):
                self._waiting.remove(fault)
                self._strike(fault.kind, self, process)
                return

    @property
    def unstruck(self) -> tuple[Fault, ...]:
        """Faults whose point nobody came to."""
        return tuple(self._waiting)


__all__ = ["Actor", "Case", "Network", "World", "WorldRules"]
