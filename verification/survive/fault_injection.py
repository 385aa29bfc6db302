"""How each kind of fault is done to a simulated process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ringside.survive.protocol import events as e
from verification.survive.faults import Kind
from verification.survive.simulated_process import Process
from verification.survive.simulated_world import World


def strike(kind: Kind, world: World[Process], process: Process) -> None:
    """Let a fault happen to a process, now."""
    _STRIKES[kind](world, process)


def _kill(world: World[Process], process: Process) -> None:
    if process.ended:
        return
    process.alive = False
    world.start_later(process.seat.rank, world.between(0.05, 0.2))


def _die(world: World[Process], process: Process) -> None:
    process.alive = False
    world.gone.add(process.seat.rank)


def _stop(world: World[Process], process: Process, low_s: float, high_s: float) -> None:
    process.stop()
    world.after(world.between(low_s, high_s), process.wake)


def _replace(world: World[Process], process: Process) -> None:
    world.start_later(process.seat.rank, world.between(0.05, 0.3))
    _stop(world, process, 0.3, 1.0)


def _cut(world: World[Process], process: Process) -> None:
    others = [seat.rank for seat in process.members if seat.rank != process.seat.rank]
    if others:
        world.network.cut(process.seat.rank, world.random.choice(others))


def _lose(world: World[Process], process: Process) -> None:
    world.network.lose_next_of(process.seat.rank)


def _delay(world: World[Process], process: Process) -> None:
    world.network.delay_next_of(process.seat.rank)


def _slow(world: World[Process], process: Process) -> None:
    world.slow_store(process.seat.rank, world.between(0.1, 1.0))


def _suspect(world: World[Process], process: Process) -> None:
    others = [other for other in world.living() if other is not process]
    if others:
        world.random.choice(others).suspect(process.seat)


def _drain(world: World[Process], process: Process) -> None:
    leader = next((p for p in world.living() if p.member.is_leader and not p.ended), None)
    if leader is not None:
        leader.post(lambda: leader.feed(e.DrainWanted(process.seat.rank)))


def _corrupt(world: World[Process], process: Process) -> None:
    process.corrupt()


def _all_gone(world: World[Process], process: Process) -> None:
    for other in world.living():
        _kill(world, other)


def _all_asleep(world: World[Process], process: Process) -> None:
    for other in world.living():
        if other is not process:
            _stop(world, other, 0.4, 1.5)
    _replace(world, process)


_STRIKES: dict[Kind, Callable[[World[Process], Process], None]] = {
    Kind.KILL: _kill,
    Kind.DEATH: _die,
    Kind.ZOMBIE: partial(_stop, low_s=0.02, high_s=0.8),
    Kind.REPLACED: _replace,
    Kind.STALL: partial(_stop, low_s=0.7, high_s=1.2),
    Kind.HALF_OPEN: _cut,
    Kind.LOST: _lose,
    Kind.DELAYED: _delay,
    Kind.LATE_STORE: _slow,
    Kind.SUSPECTED: _suspect,
    Kind.CORRUPT: _corrupt,
    Kind.DRAINED: _drain,
    Kind.ALL_GONE: _all_gone,
    Kind.ALL_ASLEEP: _all_asleep,
}

__all__ = ["strike"]
