"""`attach()`: one line that synchronises and watches a DistributedDataParallel model."""

from __future__ import annotations

import atexit
import logging
import os
import weakref

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringside.engine import HostCommunicator, Settings
from ringside.errors import UnsupportedError, UsageError
from ringside.isolation import Guard
from ringside.monitor.replicas import digest_steps
from ringside.pytorch.communicator.communicator import GroupCommunicator
from ringside.pytorch.communicator.communicator import communicator as group_communicator
from ringside.pytorch.ddp.attached_model import Attachment, attachment_of, hold, own_hook, satisfies
from ringside.pytorch.ddp.reducers import NativeReducer
from ringside.pytorch.ddp.ringside_reducer import BucketReducer, RingsideReducer
from ringside.pytorch.ddp.watcher import user_hook_name
from ringside.pytorch.recording import session as sessions
from ringside.pytorch.store import EngineDecision, OwnTimeout, agree_on_engine, decide, first_error

ENGINES = ("auto", "ringside", "native")

_log = logging.getLogger(__name__)


def attach(
    model: DistributedDataParallel,
    *,
    engine: str | None = None,
    monitor: bool = True,
    run_dir: str | os.PathLike[str] | None = None,
    digest_every: int | None = None,
) -> Attachment:
    """Synchronise a DDP model's gradients with Ringside's engine and watch every step. A collective.

    On one host, gradients travel through shared memory without copies; between hosts, by the algorithm that measured
    best (`ringside.communicator`). For CUDA models the process group's own collective carries them and Ringside only
    watches. Nobody waits longer for another rank than the process group would: the timeout that it was made with counts
    before RINGSIDE_TIMEOUT_S, and that where the script gave none.

    Args:
        model: The model, wrapped. Attached before its first backward, nothing is copied; a model that is attached
            already is left as it is.
        engine: `auto` (the default; RINGSIDE_ENGINE overrides it), `ringside` (an error where it cannot be) or
            `native` (only watch).
        monitor: Record steps, watch for slow ranks and write a run directory.
        run_dir: Where rank 0 writes the run (default: RINGSIDE_RUN_DIR, else a new directory under `runs/`).
        digest_every: Compare the parameters of all ranks to the last bit every so many synchronised steps (default:
            RINGSIDE_DIGEST_EVERY, else 100); 0: never. Rank 0's counts for all.

    Returns:
        The `Attachment`. With RINGSIDE=off in the environment it does nothing at all.

    Raises:
        UsageError: `model` is not a DistributedDataParallel model, `engine` is unknown, or `digest_every` is no number
            of steps.
        UnsupportedError: `engine="ringside"` and some rank cannot.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"attach() needs a model wrapped in DistributedDataParallel, not a {type(model).__name__}: "
            "attach(DistributedDataParallel(model))"
        )

    # 1. What is requested, and what stands in the way.
    requested = engine or os.environ.get("RINGSIDE_ENGINE") or "auto"
    if requested not in ENGINES:
        raise UsageError(f"there is no engine {requested!r}; there are {', '.join(ENGINES)}")
    if os.environ.get("RINGSIDE", "").lower() in ("off", "0"):
        return Attachment(model, "RINGSIDE=off")
    if model._use_python_reducer:
        why = "torch.compile has its gradients reduced as they are compiled (optimize_ddp = 'python_reducer')"
        if requested == "ringside":
            raise UnsupportedError(f"the ringside engine does not support this model: {why}")
        _warn_once(f"ringside leaves this model alone: {why}")
        return Attachment(model, why)
    every = digest_steps(digest_every)
    earlier = attachment_of(model)
    if earlier is not None:
        if satisfies(earlier, requested, monitor):
            return earlier
        earlier.detach()

    # 2. Agree on the engine: a collective, as is all that follows.
    decision, reducer = _open_reducer(model, requested)
    if requested == "ringside" and decision.engine != "ringside":
        raise UnsupportedError(f"the ringside engine does not support this model: {decision.why}")
    if decision.engine != "ringside" and requested != "native":
        _warn_once(f"ringside only watches this model: {decision.why}")

    # 3. The monitor; where it cannot be made, training goes on without.
    if monitor and dist.get_world_size(model.process_group) < dist.get_world_size():
        # Ranks of different groups do different work, and nobody may be compared with them (or wait for their records).
        text = "steps of a model that only some ranks train are not recorded yet, only synchronised"
        _warn_once(text, model.process_group)
        monitor = False
    session: sessions.Session | None = None
    if monitor:
        every = decide(model.process_group, "digests", every, lambda offers: offers[0], int)
        with Guard("watching this rank"):
            session = sessions.begin(run_dir, decision.engine)

    # 4. At exit peers learn that this rank leaves before its session waits for theirs: exit handlers run last to first.
    _reducers.add(reducer)
    atexit.unregister(_close_reducers)
    atexit.register(_close_reducers)
    return hold(model, decision, reducer, session, every)


_warned: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def _warn_once(message: str, group: dist.ProcessGroup | None = None) -> None:
    """Warn on rank 0, of the job or of a group, but not again for the next model of the same job."""
    assert dist.group.WORLD is not None  # there is a model with a process group
    warned = _warned.setdefault(dist.group.WORLD, set())
    if dist.get_rank(group) == 0 and message not in warned:
        warned.add(message)
        _log.warning("%s", message)


def _open_reducer(model: DistributedDataParallel, requested: str) -> tuple[EngineDecision, BucketReducer]:
    """Agree on what reduces the gradients and open it; where one rank cannot, no rank does. A collective."""
    group, hook = model.process_group, own_hook(model)
    has_user_hook = bool(user_hook_name(model)) if hook is None else hook.has_user_hook

    # 1. What this rank has against our engine; ranks agree on what all of them can.
    objection = ""
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        objection = f"its parameters are on {', '.join(sorted(devices))}, and shared memory is for CPU tensors"
    elif has_user_hook:
        objection = "the model already has a communication hook"
    decision = agree_on_engine(group, requested, objection)
    if decision.engine != "ringside":
        return decision, NativeReducer(group)

    # 2. Open the communicator. Whatever goes wrong, the others wait to hear of it in step 3.
    communicator: HostCommunicator | GroupCommunicator | None = None
    problem = ""
    try:
        timeout_s = OwnTimeout(group).seconds()
        if decision.hosts > 1:
            communicator = group_communicator(group, timeout=timeout_s)
        else:
            settings = Settings.of_environment(timeout=timeout_s)
            communicator = HostCommunicator(decision.key, dist.get_rank(group), dist.get_world_size(group), settings)
    except Exception as error:
        problem = str(error) or type(error).__name__

    # 3. All have one, or none has.
    problem = first_error(group, problem)
    if communicator is not None and not problem:
        return decision, RingsideReducer(communicator, group)
    if communicator is not None:
        communicator.close()
    return EngineDecision("native", why=problem), NativeReducer(group)


_reducers: weakref.WeakSet[BucketReducer] = weakref.WeakSet()


def _close_reducers() -> None:
    for reducer in list(_reducers):
        reducer.close(at_once=True)  # every backward has been waited for, or was aborted
