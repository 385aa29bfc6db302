"""The kill matrix: every rank × round × bucket × phase × kind of fault, and rejoining while another one fails.

Each case once walks the ring, whose rounds every rank takes part in; more cases walk other schedules as well. `strike`
does each kind of fault to a simulated process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringside.survive.protocol import events as e
from verification.survive.broken_rules import Rules
from verification.survive.faults import Fault, Kind, Phase, Point
from verification.survive.sample_counting import Counting
from verification.survive.simulated_exchange import rounds_of
from verification.survive.simulated_process import Process
from verification.survive.simulated_world import Case, World, WorldRules

RANKS = 4
# The step that faults strike in: neither the first nor the last.
STEP = 1
DATA = (Phase.BEFORE_SEND, Phase.MID_CHUNK, Phase.AFTER_SEND, Phase.AFTER_RECEIVE)
MOMENTS = (Phase.COMPUTING, Phase.BEFORE_DECIDE, Phase.BEFORE_APPLY, Phase.CHECKPOINT)
REJOINING = (Phase.ASKING, Phase.FETCHING, Phase.SERVING)
ENDING = (Phase.LAST_APPLIED, Phase.KEPT, Phase.OVER, Phase.SAVING)
# Where in the last step a fault strikes: who dies there comes back when the others are done.
LAST_STEP = (Phase.COMPUTING, Phase.BEFORE_DECIDE, Phase.BEFORE_APPLY)
ALGORITHMS = ("ring", "halving_doubling", "direct", "two_tree", "recursive_doubling", "parameter_server")


@dataclass(frozen=True)
class Result:
    """What came of one case.

    Args:
        case: The case.
        broken: By invariant, how it was broken.
        struck: How many of its faults found their point.
        commits: How many COMMITs were written.
        simulated_s: How long it took in its own time, seconds.
    """

    case: Case
    broken: dict[str, str]
    struck: int
    commits: int
    simulated_s: float


def run_case(case: Case, rules: Rules | None = None, outside: WorldRules | None = None) -> Result:
    """Run one case.

    Args:
        case: What is run; the same case always gives the same result.
        rules: Of the state machine; None: all are kept.
        outside: Of the world; None: all are kept.
    """
    world = make_world(case, rules, outside)
    invariants = world.run()
    return Result(case, invariants.broken, len(case.faults) - len(world.unstruck), invariants.commits, world.now)


def make_world(case: Case, rules: Rules | None = None, outside: WorldRules | None = None) -> World[Process]:
    """Return the world of a case, before anything has happened in it; arguments as of `run_case`."""
    return World(case, rules or Rules(), outside or WorldRules(), Process, strike)


def strike(kind: Kind, world: World[Process], process: Process) -> None:
    """Let a fault happen to a process, now; all times are seconds of the world's clock."""
    rank = process.seat.rank
    match kind:
        case Kind.KILL if not process.ended:
            process.alive = False
            world.start_later(rank, world.between(0.05, 0.2))
        case Kind.DEATH:
            process.alive = False
            world.gone.add(rank)
        case Kind.ZOMBIE:
            _stop_for(world, process, 0.02, 0.8)
        case Kind.STALL:  # longer than the others' patience, so that they go on without it
            _stop_for(world, process, 0.7, 1.2)
        case Kind.REPLACED:
            world.start_later(rank, world.between(0.05, 0.3))
            _stop_for(world, process, 0.3, 1.0)
        case Kind.HALF_OPEN:
            others = [seat.rank for seat in process.members if seat.rank != rank]
            if others:
                world.network.cut(rank, world.random.choice(others))
        case Kind.LOST:
            world.network.lose_next_of(rank)
        case Kind.DELAYED:
            world.network.delay_next_of(rank)
        case Kind.LATE_STORE:
            world.slow_store(rank, world.between(0.1, 1.0))
        case Kind.SUSPECTED:
            accusers = [other for other in world.living() if other is not process]
            if accusers:
                world.random.choice(accusers).suspect(process.seat)
        case Kind.DRAINED:
            leader = next((p for p in world.living() if p.member.is_leader and not p.ended), None)
            if leader is not None:
                leader.post(lambda: leader.feed(e.DrainWanted(rank)))
        case Kind.CORRUPT:
            process.corrupt()
        case Kind.ALL_GONE:
            for other in world.living():
                strike(Kind.KILL, world, other)
        case Kind.ALL_ASLEEP:
            for other in world.living():
                if other is not process:
                    _stop_for(world, other, 0.4, 1.5)
            strike(Kind.REPLACED, world, process)


def _stop_for(world: World[Process], process: Process, low_s: float, high_s: float) -> None:
    process.stop()
    world.after(world.between(low_s, high_s), process.wake)


def fault_points(model: Counting) -> list[Point]:
    """Return every point of a step that a fault can strike at, those of rejoining too."""
    rounds = range(len(rounds_of("ring", RANKS)))
    found = [Point(phase, STEP, b, k) for phase in DATA for k in rounds for b in range(model.buckets)]
    found += [Point(phase, STEP) for phase in MOMENTS]
    found += [Point(phase, model.steps - 1) for phase in LAST_STEP]
    return found + [Point(phase) for phase in (*REJOINING, *ENDING)]


def matrix_cases(seed: int = 0, count: int | None = None) -> Iterator[Case]:
    """Yield the cases of the matrix.

    Args:
        seed: Of their order and of everything random in them.
        count: How many; None: each once. With fewer every kind and phase has its share; with more they come again,
            with other delays and schedules, and with second faults elsewhere.
    """
    chance = random.Random(seed)
    once = list(_each_once(chance))
    if count is None:
        count = len(once)
    yield from once[:count]
    for number in range(len(once), count):
        case = once[number % len(once)]
        faults = case.faults
        if number % 2 == 0:
            anywhere = [point for point in fault_points(case.model) if not point.phase.rejoins]
            another = chance.choice(list(Kind)), chance.randrange(RANKS), chance.choice(anywhere)
            faults = (*faults, Fault(*another))
        # A fault strikes in a round that the algorithm has.
        algorithm = chance.choice(ALGORITHMS)
        rounds = len(rounds_of(algorithm, RANKS))
        fitting = tuple(
            replace(fault, at=replace(fault.at, round=fault.at.round % rounds)) if fault.at.phase.moves_data else fault
            for fault in faults
        )
        yield Case(chance.getrandbits(32), fitting, case.ranks, case.model, algorithm)


def _each_once(chance: random.Random) -> Iterator[Case]:
    model = Counting()
    every = list(itertools.product(Kind, fault_points(model), range(RANKS)))
    chance.shuffle(every)
    for kind, point, rank in every:
        faults: tuple[Fault, ...] = (Fault(kind, rank, point),)
        if point.phase.rejoins:
            # Somebody must die first, to rejoin: who serves state is another one than who fetches it.
            victim = (rank + chance.randrange(1, RANKS)) % RANKS if point.phase is Phase.SERVING else rank
            faults = (Fault(Kind.KILL, victim, Point(Phase.COMPUTING, STEP)), *faults)
        yield Case(chance.getrandbits(32), faults, RANKS, model)


__all__ = ["Result", "fault_points", "make_world", "matrix_cases", "run_case", "strike"]
