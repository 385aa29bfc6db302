"""What every engine must do that carries out schedules: one suite, whatever is below it.

An engine is a function `reduce(x, dtype, op, schedule)` that all ranks call alike and that leaves the result in `x`.
`check_engine` runs every algorithm there is through it, and some made of others; the results must be those of the
reference, to the bit, and the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.engine.oracle import ALLOWED, as_argument, difference, digest, elements

from ringside._core import numpy_kernels as twins
from ringside.engine.dtypes import DTYPES, FLOATING, ITEM_BYTES, OP_CODES
from ringside.engine.net.exchange.exchange import Exchange, ExchangeRequest
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature
from ringside.engine.net.reduction import make_fold
from ringside.schedule import ALGORITHMS, Schedule, by_name, chunk_bounds, pipelined, relabel, run

Array = np.ndarray[Any, Any]
Reduce = Callable[[Array, str, str, Schedule], None]
COUNTS = (0, 1, 7, 1000)
MANY = 6_007  # several segments of every chunk


def schedules(ranks: int, *, switches: bool = False) -> list[Schedule]:
    """Every algorithm; segments one after the other; ranks in another order; both."""
    found = [by_name(name, ranks) for name in sorted(ALGORITHMS)]
    found += [pipelined(by_name(name, ranks), 3) for name in ("ring", "tree", "two_tree", "recursive_doubling")]
    backwards = list(range(ranks))[::-1]
    found += [relabel(by_name(name, ranks), backwards) for name in ("ring", "parameter_server", "halving_doubling")]
    found.append(pipelined(relabel(by_name("tree", ranks), [*range(1, ranks), 0]), 2))
    return [s for s in found if switches or not s.switches]


def step_by_step(s: Schedule, inputs: list[Array], dtype: str, op: str) -> Array:
    """`ringside.schedule.run`, for an engine that rounds to the dtype whenever it has reduced: [ranks, elements]."""
    switch = [np.zeros_like(inputs[0]) for _ in range(s.switches)]
    values = [x.copy() for x in (*inputs, *switch)]
    bounds = chunk_bounds(len(inputs[0]), s.chunks).tolist()
    for k in range(s.rounds):
        before = [value.copy() for value in values]
        terms: dict[tuple[int, int], list[int]] = defaultdict(list)
        for src, dst, chunk, reducing in s.round(k):
            part = slice(bounds[chunk], bounds[chunk + 1])
            if reducing:
                terms[dst, chunk].append(src)
            else:
                values[dst][part] = before[src][part]
        for (dst, chunk), sources in terms.items():
            part = slice(bounds[chunk], bounds[chunk + 1])
            ranks = sorted(sources if dst >= s.ranks else [*sources, dst])
            values[dst][part] = twins.fold([before[r][part] for r in ranks], dtype, op)
    return np.stack(values[: s.ranks])


def wanted(s: Schedule, inputs: list[Array], dtype: str, op: str) -> Array:
    """Return what every rank must hold, for an engine of either kind where both are the same: f32, f64, integers."""
    with np.errstate(all="ignore"):
        return run(s, np.stack(inputs), twins.operation(dtype, op))


def check_one(reduce: Reduce, rank: int, s: Schedule, dtype: str, op: str, count: int) -> int:
    """Reduce once; return a digest, the same on all ranks, of which one compares the result with the reference's."""
    x = elements(dtype, count, (rank, op))
    reduce(x, dtype, op, s)
    if rank == count % s.ranks:
        inputs = [elements(dtype, count, (r, op)) for r in range(s.ranks)]
        halves = dtype in ("float16", "bfloat16")
        want = (step_by_step if halves else wanted)(s, inputs, dtype, op)
        wrong = difference(x, want[rank], dtype)
        assert not wrong, f"{s.name}({s.ranks}): {dtype} {op} of {count}: {wrong}"
    return digest(x)


def check_engine(
    reduce: Reduce, rank: int, ranks: int, *, switches: bool = False, halves: bool = True, every: int = 1
) -> list[int]:
    """Run the suite on this rank; return a digest of every result, which must be equal on all ranks.

    Args:
        reduce: The engine.
        rank: This rank.
        ranks: Their number.
        switches: The engine has a place for switches.
        halves: It rounds f16 and bf16 after every reduction, as `step_by_step` does.
        every: Leave out all but every so many-th case, for engines that take long.
    """
    cases = all_cases(ranks, switches=switches, halves=halves)[::every]
    return [check_one(reduce, rank, *case) for case in cases]


def all_cases(ranks: int, *, switches: bool, halves: bool) -> list[tuple[Schedule, str, str, int]]:
    """Return (schedule, dtype, reduction, elements): sizes with f32, and a fifth of all reductions per schedule."""
    sums = [(d, o) for d, o in ALLOWED if o != "avg" and (halves or d not in ("float16", "bfloat16"))]
    cases: list[tuple[Schedule, str, str, int]] = []
    for at, s in enumerate(schedules(ranks, switches=switches)):
        cases += [(s, "float32", "sum", count) for count in (*COUNTS, MANY)]
        cases += [(s, dtype, op, 501) for dtype, op in sums[at % 5 :: 5]]
    return cases


def by_exchange(exchange: Exchange, ranks: int) -> Reduce:
    """The interpreter over messages."""

    def reduce(x: Array, dtype: str, op: str, s: Schedule) -> None:
        run_schedule(exchange, s, x, dtype, op)

    return reduce


def run_schedule(
    exchange: Exchange, s: Schedule, x: Array, dtype: str = "float32", op: str = "sum", **more: Any
) -> None:
    code, item = DTYPES.index(dtype), ITEM_BYTES[DTYPES.index(dtype)]
    data = x.view(np.uint8)
    plan = plan_messages(s, exchange.transport.rank)
    bounds = (chunk_bounds(len(x), plan.chunks) * item).tolist()
    chunks = [data[bounds[c] : bounds[c + 1]] for c in range(plan.chunks)]
    call = CollectiveSignature(1, code, OP_CODES[op], len(x))
    how = {name: more.pop(name) for name in ("last_fold", "members", "wire") if name in more}
    request = ExchangeRequest(plan, item, make_fold(code, OP_CODES[op]), call, **how)
    ExchangeRun(exchange, request, chunks, **more).run()


def be_a_switch(exchange: Exchange, ranks: int, *, every: int = 1) -> None:
    """Take part in the suite as vertex `ranks`, which has no tensor of its own."""
    for s, dtype, op, count in all_cases(ranks, switches=True, halves=True)[::every]:
        if s.switches:
            run_schedule(exchange, s, np.zeros_like(elements(dtype, count, 0)), dtype, op)


def by_communicator(comm: Any) -> Reduce:
    """The native interpreter in shared memory."""

    def reduce(x: Array, dtype: str, op: str, s: Schedule) -> None:
        comm.all_reduce(as_argument(x, dtype), op, algorithm=s)

    return reduce


def is_close(x: Array, inputs: list[Array], dtype: str, roundings: int) -> bool:
    """Tell whether a sum of f16 or bf16 is right, for an engine that adds in an order and precision of its own."""
    wide = np.stack([twins.widen(one, dtype).astype(np.float64) for one in inputs])
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[dtype]
    bound = roundings * unit * np.abs(wide).sum(0) + np.finfo(np.float32).tiny
    return bool((np.abs(twins.widen(x, dtype).astype(np.float64) - wide.sum(0)) <= bound).all())


__all__ = ["FLOATING", "be_a_switch", "by_communicator", "by_exchange", "check_engine", "check_one", "run_schedule"]
