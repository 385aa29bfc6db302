"""The kill matrix: every rank × round × bucket × phase × kind of fault, and rejoining while another one fails.

Each case once walks the ring, whose rounds every rank takes part in; more cases walk other schedules as well.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringside.survive.protocol.settings import Rules
from verification.survive.fault_injection import strike
from verification.survive.faults import Fault, Kind, Phase, Point
from verification.survive.sample_counting import Counting
from verification.survive.simulated_exchange import rounds_of
from verification.survive.simulated_process import Process
from verification.survive.simulated_world import Case, World, WorldRules

RANKS = 4
STEP = 1
"""The step that faults strike in: neither the first nor the last."""
DATA = (Phase.BEFORE_SEND, Phase.MID_CHUNK, Phase.AFTER_SEND, Phase.AFTER_RECEIVE)
MOMENTS = (Phase.COMPUTING, Phase.BEFORE_DECIDE, Phase.BEFORE_APPLY, Phase.CHECKPOINT)
REJOINING = (Phase.ASKING, Phase.FETCHING, Phase.SERVING)
ENDING = (Phase.LAST_APPLIED, Phase.KEPT, Phase.OVER, Phase.SAVING)
LAST_STEP = (Phase.COMPUTING, Phase.BEFORE_DECIDE, Phase.BEFORE_APPLY)
"""Where in the last step a fault strikes: who dies there comes back when the others are done."""
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


def points(model: Counting) -> list[Point]:
    """Return every point of a step that a fault can strike at, those of rejoining too."""
    rounds = range(len(rounds_of("ring", RANKS)))
    found = [Point(phase, STEP, b, k) for phase in DATA for k in rounds for b in range(model.buckets)]
    found += [Point(phase, STEP) for phase in MOMENTS]
    found += [Point(phase, model.steps - 1) for phase in LAST_STEP]
    return found + [Point(phase) for phase in (*REJOINING, *ENDING)]


def cases(seed: int = 0, count: int | None = None) -> Iterator[Case]:
    """Yield the cases of the matrix.

    Args:
        seed: Of their order and of everything random in them.
        count: How many; None: each once. With fewer every kind and phase has its share; with more they come again,
            with other delays and schedules, and with second faults elsewhere.
    """
    chance = random.Random(seed)
    once = list(_once(chance))
    if count is None:
        count = len(once)
    yield from once[:count]
    for number in range(len(once), count):
        case = once[number % len(once)]
        faults = case.faults if number % 2 else (*case.faults, _anything(chance, case.model))
        algorithm = chance.choice(ALGORITHMS)
        fitting = tuple(_fitted(fault, algorithm) for fault in faults)
        yield Case(chance.getrandbits(32), fitting, case.ranks, case.model, algorithm)


def _once(chance: random.Random) -> Iterator[Case]:
    model = Counting()
    every = list(itertools.product(Kind, points(model), range(RANKS)))
    chance.shuffle(every)
    for kind, point, rank in every:
        faults: tuple[Fault, ...] = (Fault(kind, rank, point),)
        if point.phase.rejoins:
            faults = (_first_death(chance, rank, point), *faults)
        yield Case(chance.getrandbits(32), faults, RANKS, model)


def _first_death(chance: random.Random, rank: int, point: Point) -> Fault:
    """Return the fault that makes somebody rejoin: who serves state is another one than who fetches it."""
    victim = (rank + chance.randrange(1, RANKS)) % RANKS if point.phase is Phase.SERVING else rank
    return Fault(Kind.KILL, victim, Point(Phase.COMPUTING, STEP))


def _anything(chance: random.Random, model: Counting) -> Fault:
    anywhere = [point for point in points(model) if not point.phase.rejoins]
    return Fault(chance.choice(list(Kind)), chance.randrange(RANKS), chance.choice(anywhere))


def _fitted(fault: Fault, algorithm: str) -> Fault:
    """Return the fault at a round that the algorithm has."""
    at = fault.at
    rounds = len(rounds_of(algorithm, RANKS))
    return replace(fault, at=replace(at, round=at.round % rounds)) if at.phase.moves_data else fault


__all__ = ["Result", "cases", "make_world", "points", "run_case"]
