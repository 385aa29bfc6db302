"""`ringside predict` without a part: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringside.errors import UsageError
from ringside.predict.memory import DEVICE_BYTES, WEIGHT_BYTES
from ringside.predict.options import AUTO
from ringside.predict.plan import Plan, Question, plan
from ringside.predict.topology import Topology
from ringside.predict.topology_read import load_topology, preset, presets
from ringside.view.plan_words import long, short

SCHEMA = 1
DEFAULT_BYTES = 1e9
_SIZE = re.compile(r"^([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*(?:([kmgtp])(ib?|b)?|b)?$", re.IGNORECASE)
_COUNT = re.compile(r"^([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*([kmbt]?)$", re.IGNORECASE)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside predict`."""
    add = parser.add_argument
    add("--preset", metavar="NAME", help=f"hardware: {', '.join(presets())}")
    add("--topology", metavar="FILE", help="hardware of one's own: TOML, or what `ringside probe -o` wrote")
    add("--hosts", type=int, metavar="N", help="how many (default: as the preset or file says)")
    add("--ranks-per-host", type=int, metavar="N", help="ranks used on each (default: all)")
    add("--model", metavar="COUNT", help="parameters: 70B, 350M")
    add(
        "--params-from",
        metavar="MODULE:FACTORY",
        help="count those of the model that FACTORY() returns; imports MODULE",
    )
    add("--bytes", metavar="SIZE", help="of all gradients: 1GB is 10^9, 1GiB and 1G (as in nccl-tests) are 2^30")
    add("--dtype", choices=sorted(WEIGHT_BYTES), default="bf16", help="of weights and gradients (default: bf16)")
    add("--algorithm", default=AUTO, metavar="NAME", help="ring, tree, nvls, ... (default: what the library takes)")
    add("--memory", metavar="SIZE", help="of a rank's device: 80GB (default: as the preset's datasheet says)")
    add(
        "--compute-seconds",
        type=float,
        metavar="S",
        help="forward and backward of a step: buckets, overlap, efficiency",
    )
    add("--batch-per-rank", type=int, default=1, metavar="N", help="samples per rank and micro-step")
    add("--accumulate", type=int, default=1, metavar="N", help="micro-steps per synchronisation")
    add("--base-batch", type=int, metavar="N", help="batch that the learning rate was found with (default: a rank's)")
    add("--all", action="store_true", help="all tables, however long")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what synchronisation would cost; 1 where the model fits no way."""
    found = plan(question(args))
    if args.json:
        print(json.dumps(to_json(found), indent=1))
    else:
        print("\n".join(long(found) if args.all else short(found)))
    unfit = found.fit is not None and found.fit.refused and found.sharded is None
    return 1 if unfit else 0


def question(args: argparse.Namespace) -> Question:
    """Return what the arguments ask.

    Raises:
        UsageError: They contradict each other, or a figure cannot be.
    """
    topology = _topology(args)
    parameters = _parameters(args)
    return Question(
        topology=topology,
        size_bytes=_gradient_bytes(args, parameters),
        algorithm=args.algorithm.lower().replace("-", "_"),
        parameters=parameters,
        dtype=args.dtype,
        memory_bytes=size_bytes(args.memory, "--memory") if args.memory else DEVICE_BYTES.get(topology.name),
        compute_s=args.compute_seconds,
        batch_per_rank=args.batch_per_rank,
        accumulated=args.accumulate,
        base_batch=args.base_batch,
    )


def _topology(args: argparse.Namespace) -> Topology:
    if bool(args.preset) == bool(args.topology):
        raise UsageError(f"say what it runs on: --preset NAME or --topology FILE; presets are {', '.join(presets())}")
    if args.preset:
        return preset(args.preset, args.hosts, args.ranks_per_host)
    found = load_topology(args.topology)
    if args.hosts is None and args.ranks_per_host is None:
        return found
    return found.sized(found.hosts if args.hosts is None else args.hosts, args.ranks_per_host)


def _parameters(args: argparse.Namespace) -> float | None:
    if args.model and args.params_from:
        raise UsageError("--model or --params-from, not both")
    if args.params_from:
        return parameters_from(args.params_from)
    if not args.model:
        return None
    match = _COUNT.match(args.model.strip())
    number = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2].lower()] if match else 0.0
    if not (math.isfinite(number) and number >= 1):
        raise UsageError(f"--model {args.model}: a number of parameters such as 70B, 350M or 124e6")
    return number


def parameters_from(where: str) -> float:
    """Return how many parameters the model has that `module:factory` makes; imports and calls it.

    Raises:
        UsageError: There is no such module or factory, or what it returns has no parameters.
    """
    name, _, factory = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(importlib.import_module(name), factory)()
        number = float(sum(one.numel() for one in model.parameters()))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--params-from {where}: MODULE:FACTORY that returns a model: {reason}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if number < 1:
        raise UsageError(f"--params-from {where}: its model has no parameters")
    return number


def _gradient_bytes(args: argparse.Namespace, parameters: float | None) -> float:
    if args.bytes is not None:
        return size_bytes(args.bytes, "--bytes")
    return DEFAULT_BYTES if parameters is None else parameters * WEIGHT_BYTES[args.dtype]


def size_bytes(text: str, option: str) -> float:
    """Return the bytes that a size stands for: `1GB` is 10^9; `1GiB`, `1G` are 2^30, as nccl-tests reads them.

    Raises:
        UsageError: It is no size, or not more than 0.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise UsageError(f"{option} {text}: a size such as 1GB (10^9), 1GiB or 1G (2^30), or a number of bytes")
    power = " kmgtp".index((match[2] or " ").lower())
    number = float(match[1]) * (1000.0 if (match[3] or "").lower() == "b" else 1024.0) ** power
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{option} {text}: more than 0 bytes")
    return number


def to_json(found: Plan) -> dict[str, Any]:
    """Return a plan as plain data: the fields of `ringside.predict.plan.Plan`, the topology in words."""
    asked = found.question
    data = asdict(found)
    plain = {name: getattr(asked, name) for name in ("size_bytes", "algorithm", "parameters", "dtype", "memory_bytes")}
    plain |= {"compute_seconds": asked.compute_s, "topology": asked.topology.describe()}
    plain |= {"hosts": asked.topology.hosts, "ranks": asked.topology.ranks}
    ranking = [{"size_bytes": at, "algorithms": [asdict(one) for one in row]} for at, row in found.ranking.items()]
    return {"schema": SCHEMA} | data | {"question": plain, "ranking": ranking}
