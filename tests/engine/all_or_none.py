"""How ranks agree whether a collective that somebody gives up has failed, as a model whose every state is visited.

The model is `_core/communicator.cpp` (`arrive`, `wait`, `holds`, `settle`, `leave`) with one step per access to shared
memory. A rank's store of its flag stays in its store buffer until any later moment, as on x86; a fence or a
compare-and-swap empties it. At any moment where it waits a rank may give up, and any may stop for ever: that is a run
that goes on without it. `without` leaves out one part of the protocol, to show that it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

NONE, LEAVING, FAILED = range(3)
RULES = (
    "the fence after the flag",
    "the look at the word",
    "saying it first",
    "the last look",
    "deciding by one swap",
    "saying it once",
)


class Rank(NamedTuple):
    """Where a rank stands: the step to do, of which collective, the flag to look at next, the word as last seen, ..."""

    step: str = "arrive"
    seq: int = 1
    at: int = 0
    seen: tuple[int, int, int] = (NONE, 0, 0)
    buffered: bool = False
    said: bool = False


class State(NamedTuple):
    """All shared memory, and where all ranks stand."""

    flags: tuple[int, ...]
    word: tuple[int, int, int]  # fate, rank, seq
    ranks: tuple[Rank, ...]


def problem(ranks: int, collectives: int, without: str = "") -> str:
    """Visit all states; return how a collective ended differently on two ranks, or ""."""
    first = State((0,) * ranks, (NONE, 0, 0), (Rank(),) * ranks)
    known, queue = {first}, [first]
    while queue:
        state = queue.pop()
        failed = {rank.seq for rank in state.ranks if rank.step == "failed"}
        done = max(rank.seq - (rank.step != "finished") for rank in state.ranks)
        if failed and min(failed) <= done:
            return f"collective {min(failed)} failed on one rank and succeeded on another: {state}"
        for after in _after(state, collectives, without):
            if after not in known:
                known.add(after)
                queue.append(after)
    return ""


def _after(state: State, collectives: int, without: str) -> Iterator[State]:
    for me, rank in enumerate(state.ranks):
        if rank.buffered:
            yield _with(_stored(state, me), me, rank._replace(buffered=False))
        yield from _steps(state, me, rank, collectives, without)


def _steps(state: State, me: int, rank: Rank, collectives: int, without: str) -> Iterator[State]:
    """Give every state that a step of one rank may lead to."""

    def go(step: str, **rest: object) -> State:
        return _with(state, me, rank._replace(step=step, **rest))  # type: ignore[arg-type]

    def swap(seen: tuple[int, int, int], new: tuple[int, int, int], then: State, again: str) -> State:
        if state.word == seen:
            return then._replace(word=new)
        return go(again, seen=state.word, at=0)

    finished = go("finished") if rank.seq == collectives else _with(state, me, Rank(seq=rank.seq + 1))
    come = rank.at < len(state.flags) and (state.flags[rank.at] >= rank.seq or rank.at == me)
    fate, _, seq = rank.seen
    leaving = (LEAVING, me, rank.seq)
    if rank.step == "arrive":
        yield go("fence", buffered=True)
    elif rank.step == "fence":
        if not rank.buffered or without == RULES[0]:
            yield go("wait", at=0)
    elif rank.step == "wait":
        if rank.at == len(state.flags):
            yield finished if without == RULES[1] else go("settle", seen=state.word)
        elif come:
            yield go("wait", at=rank.at + 1)
        else:
            yield go("leave", seen=state.word, at=0)
    elif rank.step == "settle":
        if fate == NONE or seq > rank.seq or (fate == LEAVING and seq < rank.seq):
            yield finished
        elif fate == FAILED:
            yield go("failed")
        elif without == RULES[4]:
            yield finished
        elif not rank.buffered:
            yield swap(rank.seen, (NONE, 0, 0), finished, "settle")
    elif rank.step == "leave" and not rank.buffered:
        if (rank.said and without != RULES[5]) if fate == NONE else seq > rank.seq:
            yield finished
        elif fate == FAILED:
            yield go("failed")
        elif fate == LEAVING and seq == rank.seq:
            yield go("fail" if without == RULES[3] else "look", at=0, said=True)
        elif without == RULES[2]:
            yield swap(rank.seen, (FAILED, me, rank.seq), go("failed"), "leave")
        else:
            yield swap(rank.seen, leaving, go("leave", seen=leaving), "leave")
    elif rank.step == "look":
        if rank.at == len(state.flags):
            yield swap(rank.seen, (NONE, 0, 0), finished, "leave")
        else:
            yield go("look", at=rank.at + 1) if come else go("fail")
    elif rank.step == "fail":
        yield swap(rank.seen, (FAILED, me, rank.seq), go("failed"), "leave")


def _with(state: State, me: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:me], rank, *state.ranks[me + 1 :]))


def _stored(state: State, me: int) -> State:
    flags = (*state.flags[:me], state.ranks[me].seq, *state.flags[me + 1 :])
    return state._replace(flags=flags)
