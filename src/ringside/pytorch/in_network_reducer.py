"""A reducer at the switch: the additional vertex of `in_network`, as a process of its own.

Every rank sends its tensor up, the reducer adds in rank order and sends the sum down (SHARP's idea, in a process where
real fabrics have silicon). Ranks make their communicator with `switch=True`; the reducer is started where all of them
reach it, with the job's MASTER_ADDR and MASTER_PORT:

    python -m ringside.pytorch.in_network_reducer

It serves until the ranks leave.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.exchange import Exchange, ExchangeRequest
from ringside.engine.net.exchange.plan import MessagePlan, plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import OWN_SCALE, WHOLE_FOLD, SignatureMismatch
from ringside.engine.net.exchange.wire import make_wire
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import make_fold
from ringside.engine.transports.base import LinkError, LinkFailure
from ringside.engine.transports.gloo import GlooTransport
from ringside.errors import RingsideError, UsageError
from ringside.schedule import in_network

# -------------------------------------------------------------------------------------------------
# How the ranks of a job and the reducer at their switch meet: over a part of the job's store with a fixed name.

_PREFIX = "ringside/switch"


class SwitchPlan(msgspec.Struct):
    """What the reducer learns from rank 0.

    Args:
        ranks: Number of ranks; the reducer is the vertex of this number.
        leaders: The first rank of each host.
        message_bytes: Largest payload of one message.
    """

    ranks: int
    leaders: list[int]
    message_bytes: int


def join_switch(store: Store, roster: RankMap, message_bytes: int) -> Store:
    """Return the part of the store over which ranks and the reducer meet; rank 0 writes who there is.

    Raises:
        UsageError: On all ranks: this store's reducer has met a communicator already.
    """
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    shared = PrefixStore(_PREFIX, root)
    if shared.add(f"joined/{roster.rank}", 1) > 1:  # a communicator is made by all ranks, so all see the same
        raise UsageError("the reducer at the switch serves one communicator, and this job has one with switch=True")
    if roster.rank == 0:
        plan = SwitchPlan(roster.size, list(roster.lane(0)), message_bytes)
        shared.set("plan", msgspec.json.encode(plan).decode())
    return PrefixStore("messages", shared)


def meet_ranks(store: Store) -> tuple[SwitchPlan, Store]:
    """Wait for rank 0 and return, at the reducer, its plan and the part of the store to meet over."""
    shared = PrefixStore(_PREFIX, store)
    return msgspec.json.decode(shared.get("plan"), type=SwitchPlan), PrefixStore("messages", shared)


IDLE_S = 86400.0
_LEAVING_S = 1.0  # for the last message to the ranks
TRY = datetime.timedelta(seconds=5)


def serve(store: Store, *, timeout_s: float = IDLE_S) -> int:
    """Reduce for the ranks that meet over `store` until they leave.

    Args:
        store: The job's store, as it is (no prefix).
        timeout_s: Longest wait for the ranks and between collectives, seconds.

    Returns:
        Collectives run.

    Raises:
        LinkError: A rank died, or ranks called different things.
    """
    switch_plan, messages = meet_ranks(store)
    transport = GlooTransport(messages, switch_plan.ranks, switch_plan.ranks + 1, timeout_s=timeout_s)
    exchange = Exchange(transport, segment_bytes=switch_plan.message_bytes)
    plans = {
        plan.hash: (plan, members)
        for members in (list(range(switch_plan.ranks)), switch_plan.leaders)
        for plan in [plan_messages(in_network(len(members)), len(members))]
    }
    # Rank 0 is in every collective, as itself or as its host's leader, and names its schedule in the header.
    done = 0
    try:
        while True:
            _serve_one(exchange, plans, switch_plan.ranks)
            done += 1
    except LinkError as error:
        transport.fail(error.cause)
        if error.cause.kind != "left":
            raise
        return done
    except SignatureMismatch:
        transport.fail(LinkFailure("disagreed", switch_plan.ranks))
        raise
    finally:  # a thread that is inside of torch when the interpreter ends would abort the process
        transport.close(patience_s=_LEAVING_S)


def _serve_one(exchange: Exchange, plans: dict[int, tuple[MessagePlan, list[int]]], switch: int) -> None:
    """Wait for rank 0 to begin a collective and take part in it; it is in every one, as itself or as a leader."""
    hash_of_plan, call = exchange.peek(0)
    if hash_of_plan not in plans:
        raise LinkError(LinkFailure("disagreed", switch), "rank 0 runs a schedule that is not in_network")
    plan, members = plans[hash_of_plan]
    chunk = np.empty(call.elements * ITEM_BYTES[call.dtype], dtype=np.uint8)
    fold = make_fold(call.dtype, call.op)
    if call.flags & OWN_SCALE and call.flags & WHOLE_FOLD:
        raise LinkError(LinkFailure("disagreed", switch, "the reducer does not know the ranks' own weights"))
    if call.flags & WHOLE_FOLD:
        fold = make_fold(call.dtype, call.op, scale=call.extra, divisor=switch)
    wire = make_wire(call.wire) if call.wire else None
    item = ITEM_BYTES[call.dtype]
    request = ExchangeRequest(plan, item, fold, call, members=[*members, switch], wire=wire)
    ExchangeRun(exchange, request, [chunk]).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the job that MASTER_ADDR and MASTER_PORT name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ringside.pytorch.in_network_reducer", description=__doc__)
    parser.add_argument("--timeout", type=float, default=IDLE_S, metavar="S", help="longest idle time, seconds")
    args = parser.parse_args(argv)
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError("the reducer needs the job's MASTER_ADDR and MASTER_PORT in its environment") from None

    # The job's store may come later; torch's own pauses between tries would grow with the timeout.
    deadline = time.monotonic() + args.timeout
    while True:
        try:
            store = TCPStore(address, port, is_master=False, timeout=TRY, wait_for_workers=False)
            break
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
    store.set_timeout(datetime.timedelta(seconds=args.timeout))
    done = serve(store, timeout_s=args.timeout)
    print(f"reducer: {done} collectives", file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RingsideError as problem:
        print(f"reducer: {problem}", file=sys.stderr)
        sys.exit(problem.exit_status)
    except LinkError as problem:
        print(f"reducer: {problem.cause.kind} rank {problem.cause.vertex}", file=sys.stderr)
        sys.exit(1)
