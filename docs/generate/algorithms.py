"""docs/algorithms.md, made from the schedules: every figure in it is counted by `verify`, so it cannot lie.

`python -m docs.generate.algorithms > docs/algorithms.md` writes it; a test fails when it is stale, and another when a
law that is written here does not hold for every number of ranks up to 64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2

from ringside.schedule.algorithms import ALGORITHMS, COLLECTIVES, Make
from ringside.schedule.algorithms.doubling import largest_power
from ringside.schedule.algorithms.hierarchical import hierarchical, host_sizes
from ringside.schedule.proof.audit import Audit
from ringside.schedule.proof.verify import verify

SAMPLES = (2, 3, 4, 7, 8, 16, 64)


@dataclass(frozen=True, slots=True)
class Law:
    """A formula as it is printed, and as it is checked, for n ≥ 2 ranks; `at_most`: it is an upper bound."""

    text: str
    value: Callable[[int], Fraction | int]
    at_most: bool = False

    def holds(self, counted: Fraction | int, n: int) -> bool:
        """Return whether the law says what was counted for n ranks."""
        return counted <= self.value(n) if self.at_most else counted == self.value(n)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the guide says about an algorithm beyond its docstring and what is counted.

    Args:
        rounds: Number of rounds.
        sent: What the busiest rank sends or receives, whichever is more, in tensors S.
        ports: The most peers of a rank in one round.
        odd: What happens when n is no power of two.
        wins: When it is the one to take.
    """

    rounds: Law
    sent: Law
    ports: Law
    odd: str
    wins: str


def _folded(n: int) -> int:
    return int(n > largest_power(n))


def _levels(n: int) -> int:
    return largest_power(n).bit_length() - 1


_BANDWIDTH = Law("2(n−1)/n · S", lambda n: Fraction(2 * (n - 1), n))
_HALF_BANDWIDTH = Law("(n−1)/n · S", lambda n: Fraction(n - 1, n))
_ONE, _TWO = Law("1", lambda n: 1), Law("2", lambda n: 2)
_ALL_PORTS = Law("n−1", lambda n: n - 1)
_AROUND = Law("n−1", lambda n: n - 1)
_LOG = Law("⌈log2 n⌉", lambda n: ceil(log2(n)))
_SAME = "no difference"
_FOLD_ROUNDS = (
    "2 more rounds and S more: each extra rank hands its tensor to a neighbour first and gets the result last"
)


def _largest_host(n: int) -> int:
    return max(host_sizes(n))


def _hierarchical_bytes(n: int) -> Fraction:
    """Add 2(g-1)/g inside a host of g ranks and a ring's 2(h-1)/h between h hosts, over the g-th part of the tensor."""
    everybody = len(host_sizes(n)) * _largest_host(n)
    return Fraction(2 * (everybody - 1), everybody)


ENTRIES: dict[str, Entry] = {
    "ring": Entry(
        Law("2(n−1)", lambda n: 2 * (n - 1)),
        _BANDWIDTH,
        _ONE,
        _SAME,
        "large tensors on uniform links, where only neighbours need to be near each other; slow for small ones and "
        "many ranks, since the rounds grow with n",
    ),
    "direct": Entry(
        _TWO,
        _BANDWIDTH,
        _ALL_PORTS,
        _SAME,
        "a switch or shared memory that all ranks can use at once; the default when the sum must be canonical",
    ),
    "parameter_server": Entry(
        _TWO,
        Law("(n−1) · S", lambda n: n - 1),
        _ALL_PORTS,
        _SAME,
        "hardly ever: the server's link carries everything. It is here to be compared with, and for two or three ranks",
    ),
    "recursive_doubling": Entry(
        Law("⌊log2 n⌋, + 2 off powers of two", lambda n: _levels(n) + 2 * _folded(n)),
        Law("⌊log2 n⌋ · S, + S off powers of two", lambda n: _levels(n) + _folded(n)),
        _ONE,
        _FOLD_ROUNDS,
        "small tensors, where only the number of rounds counts",
    ),
    "halving_doubling": Entry(
        Law("2⌊log2 n⌋, + 2 off powers of two", lambda n: 2 * _levels(n) + 2 * _folded(n)),
        Law(
            "2(p−1)/p · S with p = 2^⌊log2 n⌋, + S off powers of two",
            lambda n: Fraction(2 * (largest_power(n) - 1), largest_power(n)) + _folded(n),
        ),
        _ONE,
        _FOLD_ROUNDS,
        "middle and large tensors on powers of two: the ring's bytes in logarithmically many rounds",
    ),
    "tree": Entry(
        Law("2⌈log2 n⌉", lambda n: 2 * ceil(log2(n))),
        Law("3 S (n > 3), 2 S (n = 3), S (n = 2)", lambda n: min(n - 1, 3)),
        Law("2 (1 for n ≤ 3)", lambda n: 2 if n > 3 else 1),
        _SAME,
        "small tensors on many ranks; pipelined, middle ones",
    ),
    "two_tree": Entry(
        Law("2⌈log2 n⌉", lambda n: 2 * ceil(log2(n))),
        Law("2 S (n > 3), 3/2 S (n = 3), S (n = 2)", lambda n: {2: Fraction(1), 3: Fraction(3, 2)}.get(n, Fraction(2))),
        Law("at most 3", lambda n: min(n - 1, 3), at_most=True),
        "even n: the second tree mirrors the first; odd n: it is shifted by one, and rank 0 is inner in both",
        "pipelined, large tensors on many ranks: nearly the ring's bytes per direction at logarithmic depth",
    ),
    "chain": Entry(
        Law("2(n−1)", lambda n: 2 * (n - 1)),
        Law("2 S (n > 2), S (n = 2)", lambda n: 2 if n > 2 else 1),
        _ONE,
        _SAME,
        "pipelined, when the sum must be canonical and every rank has one good link to each neighbour",
    ),
    "one_shot": Entry(
        _ONE,
        Law("(n−1) · S", lambda n: n - 1),
        _ALL_PORTS,
        _SAME,
        "tiny tensors: one round is the least there can be, and nobody waits for a second message",
    ),
    "in_network": Entry(
        _TWO,
        Law("S", lambda n: 1),
        _ONE,
        _SAME,
        "wherever there is a switch that reduces: half of the ring's bytes, whatever n",
    ),
    "hierarchical": Entry(
        Law("2h between h hosts: 2 inside, a ring of 2(h−1) between", lambda n: 2 * len(host_sizes(n))),
        Law("2(gh−1)/(gh) · S with h hosts, the largest of g ranks; equal hosts: 2(n−1)/n · S", _hierarchical_bytes),
        Law("g−1 (1 for g = 1)", lambda n: max(_largest_host(n) - 1, 1)),
        "any host sizes; slices are their least common multiple, and a rank of a smaller host carries more of them",
        "several ranks per host and links between hosts that are slower than those inside: they carry one slice each",
    ),
    "ring_reduce_scatter": Entry(_AROUND, _HALF_BANDWIDTH, _ONE, _SAME, "large tensors"),
    "direct_reduce_scatter": Entry(_ONE, _HALF_BANDWIDTH, _ALL_PORTS, _SAME, "all links at once; canonical"),
    "ring_all_gather": Entry(_AROUND, _HALF_BANDWIDTH, _ONE, _SAME, "large tensors"),
    "direct_all_gather": Entry(_ONE, _HALF_BANDWIDTH, _ALL_PORTS, _SAME, "all links at once"),
    "binomial_broadcast": Entry(_LOG, Law("⌈log2 n⌉ · S", lambda n: ceil(log2(n))), _ONE, _SAME, "small tensors"),
    "binomial_reduce": Entry(_LOG, Law("⌈log2 n⌉ · S", lambda n: ceil(log2(n))), _ONE, _SAME, "small tensors"),
    "chain_broadcast": Entry(_AROUND, Law("S", lambda n: int(n > 1)), _ONE, _SAME, "large tensors, in segments"),
    "chain_reduce": Entry(_AROUND, Law("S", lambda n: int(n > 1)), _ONE, _SAME, "large tensors, in segments"),
    "direct_gather": Entry(_ONE, _HALF_BANDWIDTH, _ALL_PORTS, _SAME, "any size: the root's link is the limit"),
    "direct_scatter": Entry(_ONE, _HALF_BANDWIDTH, _ALL_PORTS, _SAME, "any size: the root's link is the limit"),
    "direct_all_to_all": Entry(
        _ONE, Law("(n−1)/n² · S", lambda n: Fraction(n - 1, n * n)), _ALL_PORTS, _SAME, "middle and large tensors"
    ),
    "dissemination_barrier": Entry(
        _LOG, Law("0 (its chunk is empty)", lambda n: ceil(log2(n))), _ONE, _SAME, "always: the fewest rounds"
    ),
}


def guide() -> str:
    """Return the text of docs/algorithms.md."""
    parts = [_HEAD, _overview(ALGORITHMS, 8), "## All-reduce\n"]
    parts += [_section(name, make) for name, make in ALGORITHMS.items()]
    parts += ["## Other collectives\n", _COLLECTIVES, _overview(COLLECTIVES, 8)]
    for name in COLLECTIVES:
        entry = ENTRIES[name]
        parts.append(
            f"- **{name}**: {entry.rounds.text} {'round' if entry.rounds is _ONE else 'rounds'}; busiest rank "
            f"{entry.sent.text}; ports {entry.ports.text}. For {entry.wins}."
        )
    return "\n".join(parts).rstrip() + "\n"


def busiest(audit: Audit) -> Fraction:
    """Return what the busiest rank sends or receives, whichever is more, in units of S."""
    return max(audit.max_bytes_sent, audit.max_bytes_received)


_HEAD = """# Algorithms

Made from the schedules by `python -m docs.generate.algorithms`; every figure is counted, none is typed in. S is the
tensor's size. *Rounds* are those of the form that is not pipelined. *Sent* and *received* are the busiest rank's;
*link* is what the busiest link carries in one direction. *Ports* are the most peers of a rank in one round. With one
port per rank and no switch that reduces, an all-reduce takes at least ⌈log2 n⌉ rounds and 2(n−1)/n · S sent and
received per rank: `direct`, `one_shot` and `parameter_server` use n−1 ports and `in_network` a switch, so they may
stay below.

A sum is *canonical* when it is ((x0+x1)+x2)+... on every rank, in every chunk: then its bits do not depend on the
algorithm, on the size, or on where the tensor is cut. All algorithms give the same bits on all ranks.

Combinators make others of them: `pipelined(s, segments)` cuts chunks into segments that follow each other one round
apart (same bits, `rounds + segments − 1` shorter rounds), `striped([s1, s2])` runs two side by side, `reverse(s)` runs
one backwards, `relabel(s, order)` changes who plays which rank, `on_group(s, ranks, of)` lets some of the ranks run it.

## At a glance, 8 ranks
"""

_COLLECTIVES = """\
What ranks hold at the start and want at the end is data too: `ringside.schedule.Collective`. Chunk c belongs to rank
c·n//chunks; an all-to-all has n² blocks, block i·n+j going from rank i to rank j. S is the whole tensor: of a gather,
scatter or all-to-all what all ranks hold together. Broadcast, reduce, gather and scatter take any root.
"""


def _overview(makes: dict[str, Make], n: int) -> str:
    rows = [f"| {name} | {_cells(verify(make(n)))} |" for name, make in makes.items()]
    return "\n".join(
        ["| algorithm | rounds | ports | sent | received | link | canonical |", "|---" * 7 + "|", *rows, ""]
    )


def _cells(audit: Audit) -> str:
    """Return what is counted of a schedule, as the cells of a row."""
    traffic = audit.traffic
    moved = (audit.max_bytes_sent, audit.max_bytes_received, traffic.busiest_link_bytes)
    if audit.collective.name == "barrier":
        moved = (Fraction(0),) * 3  # its chunk is empty
    figures = [
        str(audit.rounds),
        str(audit.max_ports),
        *("0" if not x else f"{'' if x == 1 else f'{x} '}S" for x in moved),
    ]
    return " | ".join([*figures, "yes" if audit.canonical else "no"])


def _section(name: str, make: Make) -> str:
    entry = ENTRIES[name]
    about = inspect.getdoc(hierarchical if name == "hierarchical" else make) or ""
    title, _, text = about.partition("\n\nReturn ")[0].partition("\n\n")
    audits = [verify(make(n)) for n in SAMPLES]
    total = "canonical"
    if not all(audit.canonical for audit in audits):
        four = next(audit for audit in audits if audit.ranks == 4)
        first, last = four.expression(0), four.expression(four.chunks - 1)
        several = "" if first == last else f" in the first chunk and `{last}` in the last"
        total = f"not canonical; with 4 ranks `{first}`{several}"
    lines = [
        f"### {name}\n",
        f"{title}\n",
        f"{text}\n" if text else "",
        f"- **Rounds:** {entry.rounds.text}",
        f"- **Busiest rank:** {entry.sent.text}",
        f"- **Ports:** {entry.ports.text}",
        f"- **Off powers of two:** {entry.odd}",
        f"- **Sum:** {total}",
        f"- **Take it for:** {entry.wins}\n",
        "| n | rounds | ports | sent | received | link | canonical |",
        "|---" * 7 + "|",
        *(f"| {audit.ranks} | {_cells(audit)} |" for audit in audits),
        "",
    ]
    return "\n".join(line for line in lines if line or line is lines[-1])


if __name__ == "__main__":
    print(guide(), end="")
