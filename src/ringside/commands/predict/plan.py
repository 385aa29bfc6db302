"""`ringside predict` without a part: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringside.commands.options import algorithm_name, host_count, write_output
from ringside.errors import UsageError
from ringside.predict.fit import installed_system
from ringside.predict.plan.memory import DEVICE_BYTES, WEIGHT_BYTES
from ringside.predict.plan.options import AUTO
from ringside.predict.plan.plan import PlanQuestion, TrainingPlan, part_fit, plan
from ringside.predict.plan.step import Job
from ringside.predict.topology.files import load_topology, preset, presets
from ringside.predict.topology.topology import Topology
from ringside.text import parse_ranks_per_host, size, size_bytes
from ringside.view.predict_text import full_plan, short_plan
from ringside.view.tui.console import printable_lines

if TYPE_CHECKING:
    from ringside.view.run.recorded import Run

SCHEMA = 1
DEFAULT_BYTES = 1e9
SLOW_ACTIONS = 20_000  # of a step, from which on a plan takes about a second
_COUNT = re.compile(r"^((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e\+?[0-9]+)?)\s*([kmbt]?)$", re.IGNORECASE)
COUNT_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside predict`."""
    add_hardware(parser)
    add_size(parser)
    add = parser.add_argument
    add(
        "--system", metavar="NAME", help="hardware as NVIDIA's aiconfigurator measured it, where installed: h200, gb300"
    )
    add("--gpus", type=int, metavar="N", help="with --system: how many in all")
    add("--nccl", metavar="VERSION", default="", help="with --system: measured with this version (default: the newest)")
    add("--memory", metavar="SIZE", help="of a rank's device: 80GB (default: as the preset's datasheet says)")
    add("--compute-seconds", type=float, metavar="S", help="forward and backward of a step: buckets, efficiency")
    add("--run", metavar="DIR", help="a recorded run: its bytes, its computation, what its buckets took")
    add("--batch-per-rank", type=int, default=1, metavar="N", help="samples per rank and micro-step (default: 1)")
    add("--accumulate", type=int, default=1, metavar="N", help="micro-steps per synchronisation (default: 1)")
    add("--base-batch", type=int, metavar="N", help="batch that the learning rate was found with (default: a rank's)")
    add("--zero", type=int, metavar="STAGE", help="sharding: 0 none, 1, 2, 3 is FSDP (default: the least that fits)")
    add("--layers", type=int, default=Job.layers, metavar="N", help=f"of the model (default: {Job.layers})")
    add("--prefetch", type=int, default=Job.prefetch, metavar="N", help="FSDP: layers gathered ahead (default: 1)")
    add("--no-reshard", action="store_true", help="FSDP: reshard_after_forward=False")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share every layer (default: 1)")
    add(
        "--pipeline-parallel",
        type=int,
        default=1,
        metavar="N",
        help="stages; micro-batches by --accumulate (default: 1)",
    )
    add("--activation-bytes", metavar="SIZE", help="of a micro-batch between layers, for these two")
    add("--all", action="store_true", help="all tables, however long")
    add("--html", type=Path, metavar="FILE", help="write it as a page with its curves")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")


def add_hardware(parser: argparse.ArgumentParser, *, algorithm: bool = True) -> None:
    """Add the arguments that name what something runs on, and with which algorithm."""
    add = parser.add_argument
    add("--preset", metavar="NAME", help=f"hardware: {', '.join(presets())}")
    add("--topology", metavar="FILE", help="custom hardware: TOML, or what `ringside probe -o` wrote")
    add("--hosts", type=host_count, metavar="N", help="how many (default: as the preset or file says)")
    add("--ranks-per-host", metavar="N", help="ranks used on each, or a list: 8,8,4 (default: all)")
    if algorithm:
        algorithm_help = "ring, tree, nvls, ... (default: what the library takes)"
        add("--algorithm", type=algorithm_name, default=AUTO, metavar="NAME", help=algorithm_help)


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that give the size of all gradients."""
    add = parser.add_argument
    add("--model", metavar="COUNT", help="parameters: 70B, 350M")
    add("--params-from", metavar="MODULE:FACTORY", help="count those of the model that FACTORY() returns; imports it")
    add("--bytes", metavar="SIZE", help="of all gradients: 1GB is 10^9, 1GiB and 1G are 2^30 (default: 1GB)")
    add("--dtype", choices=sorted(WEIGHT_BYTES), default="bf16", help="of weights and gradients (default: bf16)")


def run(args: argparse.Namespace) -> int:
    """Print what synchronisation would cost; 1 where the model fits no way."""
    if not args.system and (args.gpus is not None or args.nccl):
        raise UsageError("--gpus and --nccl go with --system NAME")
    if args.run:
        # What a recorded run did, over the hardware that arguments name.
        if args.bytes or args.compute_seconds is not None or args.system:
            raise UsageError(f"--run {args.run} gives what it synchronised and computed: omit the others")
        from ringside.view.run.recorded import Run
        from ringside.view.run.training_step import recorded_step

        recorded = Run(args.run)
        step = recorded_step(recorded, hardware_of(recorded, args))
        _, parameters = gradient_bytes(args)
        question = PlanQuestion(
            step.topology, step.size_bytes, compute_s=step.work_s, measured=step.measured, ran=step.buckets
        )
    else:
        topology = _system_hardware(args) if args.system else hardware(args)
        nbytes, parameters = gradient_bytes(args)
        question = PlanQuestion(topology, nbytes, compute_s=args.compute_seconds)
    memory_bytes = DEVICE_BYTES.get(question.topology.name)
    question = replace(
        question,
        parameters=parameters,
        dtype=args.dtype,
        algorithm=args.algorithm,
        memory_bytes=size_bytes(args.memory, "--memory") if args.memory else memory_bytes,
        batch_per_rank=args.batch_per_rank,
        accumulated=args.accumulate,
        base_batch=args.base_batch,
    )
    job = _asked_job(args, question)
    if question.compute_s is not None and job.actions >= SLOW_ACTIONS:
        count = f"{job.actions:,} layers of micro-batches"
        print(f"({count} are played for every host count and change: this takes seconds)", file=sys.stderr)
    found = plan(replace(question, job=job))
    if args.json:
        print(json.dumps(to_json(found), indent=1))
    else:
        print(printable_lines("\n".join(full_plan(found) if args.all else short_plan(found))))
    if not (args.run or args.bytes or args.model or args.params_from):
        print(f"({size(DEFAULT_BYTES)} of gradients assumed: give --bytes or --model)", file=sys.stderr)
    if args.html is not None:
        from ringside.view.html.predictions import plan_page

        write_page(args.html, plan_page(found))
    unfit = found.fit is not None and found.fit.refused and found.fit.stage is None
    return 1 if unfit else 0


def _asked_job(args: argparse.Namespace, question: PlanQuestion) -> Job:
    """Return how the model is trained: with the least stage of ZeRO that fits where none is given."""
    activations = size_bytes(args.activation_bytes, "--activation-bytes") if args.activation_bytes else 0.0
    job = Job(
        args.zero or 0,
        args.layers,
        args.prefetch,
        not args.no_reshard,
        args.tensor_parallel,
        args.pipeline_parallel,
        max(question.accumulated, 1),  # what is less is refused with the batch
        activations,
    )
    memory = part_fit(question, job) if args.zero is None else None
    return job if memory is None else replace(job, stage=memory.stage or 0)


def write_page(path: Path, page: str) -> None:
    """Write a page and print its path on stderr: stdout has the answer."""
    write_output(path, page)
    print(f"written: {path}", file=sys.stderr)


def hardware_of(run: Run, args: argparse.Namespace) -> Topology | None:
    """Return the topology that arguments name for a recorded run: a preset gets the run's hosts and ranks by default.

    None where they name none; errors as of `hardware`.
    """
    if not args.preset and not args.topology:
        return None
    # a file, or a size, is taken as it is
    if not args.preset or args.hosts is not None or args.ranks_per_host is not None:
        return hardware(args)
    from ringside.view.run.training_step import host_sizes

    sizes = host_sizes(run)
    return hardware(args).sized(len(sizes), sizes)


def _system_hardware(args: argparse.Namespace) -> Topology:
    """Return the system of --system, and print on stderr which tables measured it."""
    if args.preset or args.topology or args.hosts is not None or args.ranks_per_host is not None:
        raise UsageError("--system takes --gpus and --nccl, not --preset, --topology, --hosts or --ranks-per-host")
    if args.gpus is None:
        raise UsageError(f"--system {args.system}: how many GPUs? give --gpus N")
    topology, words = installed_system(args.system, args.gpus, args.nccl)
    print(f"({words})", file=sys.stderr)
    return topology


def hardware(args: argparse.Namespace) -> Topology:
    """Return the topology that the arguments of `add_hardware` name; raise `UsageError` where they name none."""
    if bool(args.preset) == bool(args.topology):
        raise UsageError(f"missing the hardware: --preset NAME or --topology FILE; presets are {', '.join(presets())}")
    found = preset(args.preset) if args.preset else load_topology(args.topology)
    per = None if args.ranks_per_host is None else parse_ranks_per_host(args.ranks_per_host)
    if args.hosts is None and per is None:
        return found
    hosts = found.hosts if isinstance(per, int) or per is None else len(per)
    return found.sized(hosts if args.hosts is None else args.hosts, per)


def gradient_bytes(args: argparse.Namespace) -> tuple[float, float | None]:
    """Return the bytes of all gradients and the parameters, None where only bytes are known, of `add_size`.

    A model is imported and made by `--params-from`, to count its parameters.

    Raises:
        UsageError: A size or a number of parameters cannot be, or there is no such model.
    """
    if args.model and args.params_from:
        raise UsageError("--model or --params-from, not both")
    parameters: float | None = None
    if args.params_from:
        name, _, factory = args.params_from.partition(":")
        # the user's module, as Python itself would find it from here
        sys.path.insert(0, str(Path.cwd()))
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout has the answer, whatever a model prints
                model = getattr(importlib.import_module(name), factory)()
                parameters = float(sum(tensor.numel() for tensor in model.parameters()))
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UsageError(
                f"--params-from {args.params_from}: MODULE:FACTORY that returns a model: {reason}"
            ) from error
        finally:
            sys.path.remove(str(Path.cwd()))
        if parameters < 1:
            raise UsageError(f"--params-from {args.params_from}: its model has no parameters")
    elif args.model:
        match = _COUNT.match(args.model.strip())
        parameters = float(match[1]) * COUNT_UNITS[match[2].lower()] if match else 0.0
        if not (math.isfinite(parameters) and parameters >= 1):
            raise UsageError(f"--model {args.model}: a number of parameters such as 70B, 350M or 124e6")
    if args.bytes is not None:
        return size_bytes(args.bytes, "--bytes"), parameters
    return (DEFAULT_BYTES if parameters is None else parameters * WEIGHT_BYTES[args.dtype]), parameters


def to_json(found: TrainingPlan) -> dict[str, Any]:
    """Return a plan as plain data: the fields of `ringside.predict.plan.plan.TrainingPlan`, the topology in words."""
    question = found.question
    data = asdict(found)
    plain = {
        name: getattr(question, name) for name in ("size_bytes", "algorithm", "parameters", "dtype", "memory_bytes")
    }
    plain |= {"compute_seconds": question.compute_s, "topology": question.topology.describe()}
    plain |= {"hosts": question.topology.hosts, "ranks": question.topology.ranks}
    ranking = [{"size_bytes": nbytes, "algorithms": list(map(asdict, row))} for nbytes, row in found.ranking.items()]
    return {"schema": SCHEMA} | data | {"question": plain, "ranking": ranking}
