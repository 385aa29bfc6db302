"""Parameters compared between real ranks: what drifts is named, over both engines, and nothing else is."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import on_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside import _core  # noqa: E402
from ringside._core import numpy_kernels as twins  # noqa: E402
from ringside.pytorch.recording import parameter_digests as digests  # noqa: E402

from .training import LIMIT_S, Plan, Said, build, free_port, group, one_step, small_attachment, steps  # noqa: E402

ENGINES = [pytest.param("ringside", marks=pytest.mark.native), "native"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.bool]


# ------------------------------------------------------------------------------------------------ the digest


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1023, 5), (0,), (7, 11, 13)])
def test_host_device_and_twin_agree(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = tensor_of(dtype, *shape)
    expected = digests.digest(tensor)
    assert int(digests.device_digest(tensor)) % 2**64 == expected
    monkeypatch.setattr(_core, "available", lambda: False)
    assert digests.digest(tensor) == expected


def test_large_tensors_are_cut_into_pieces_on_a_device() -> None:
    for size in (4 * twins.DIGEST_BLOCK, 11 * twins.DIGEST_BLOCK + 77):
        tensor = tensor_of(torch.float32, size)
        assert int(digests.device_digest(tensor, 2 * twins.DIGEST_BLOCK)) % 2**64 == digests.digest(tensor)


def test_layout_does_not_count_and_bits_do() -> None:
    plain = tensor_of(torch.float32, 2, 6, 4, 4)
    expected = digests.digest(plain)
    room = torch.zeros(plain.numel() + 1)
    room[1:] = plain.reshape(-1)
    for same in (plain.to(memory_format=torch.channels_last), room[1:].view_as(plain)):
        assert digests.digest(same) == int(digests.device_digest(same)) % 2**64 == expected
    zeros, nans = torch.zeros(8), torch.full((8,), float("nan"))
    others = [-zeros, zeros.double(), zeros.to(torch.int32), zeros.view(2, 4), zeros.bfloat16(), zeros.half(), nans]
    assert len({digests.digest(tensor) for tensor in (zeros, *others)}) == 1 + len(others)
    assert digests.digest(nans) == digests.digest(nans.clone())
    assert digests.digest(nans) != digests.digest(-nans)


class Elsewhere(torch.Tensor):
    """A parameter that says it is on a device, as far as digests ask."""

    is_cpu = False
    is_cuda = False


class OnCuda(Elsewhere):
    is_cuda = True


class DeviceEvent:
    """An event to which the device comes when the test says so."""

    is_over = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return DeviceEvent.is_over


def parameters_of(kinds: list[type[torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer {n}", tensor_of(torch.float32, 3 + n, 5).as_subclass(kind)) for n, kind in enumerate(kinds)]


def test_where_a_parameter_is_does_not_count() -> None:
    found = []
    for kinds in ([torch.Tensor] * 6, [torch.Tensor, *[Elsewhere] * 4, torch.Tensor]):
        named = parameters_of(kinds)
        taken = digests.ParameterDigests(dist.HashStore(), 0, named, 4)
        assert taken.check(1, 7)
        (check,), lists = taken.own()
        found.append((check.number, check.step, check.digest, lists))
    assert found[0] == found[1]


def test_digests_of_a_device_are_not_waited_for_and_are_those_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **how: empty(*size, **how))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(DeviceEvent, "is_over", False)
    named = parameters_of([OnCuda, OnCuda])
    taken = digests.ParameterDigests(dist.HashStore(), 0, named, 4)
    assert taken.check(1, 7)
    assert not taken.check(2, 8)
    assert taken.own() == ([], [])
    monkeypatch.setattr(DeviceEvent, "is_over", True)
    assert not taken.check(3, 9)
    (check,), _ = taken.own()
    assert (check.number, check.step) == (1, 7)
    assert taken.check(4, 10)
    assert [check.number for check in taken.own()[0]] == [1, 4]


# ------------------------------------------------------------------------------------------------ on the ranks


def nothing(ddp: DistributedDataParallel, rank: int) -> None:
    pass


def edits(ddp: DistributedDataParallel, rank: int) -> None:
    if rank == dist.get_world_size() - 1:
        with torch.no_grad():
            ddp.module[2].bias[1] += 1e-3


def flips_a_sign(ddp: DistributedDataParallel, rank: int) -> None:
    with torch.no_grad():
        ddp.module[4].weight[0, 0] = 0.0 if rank else -0.0


FAULTS: dict[str, Callable[[DistributedDataParallel, int], None]] = {
    "nothing": nothing,
    "edits": edits,
    "flips_a_sign": flips_a_sign,
}


def trains(port: int, path: str, engine: str, fault: str, skips: bool, repairs: bool, every: int = 2) -> dict[str, Any]:
    """Train; after step 5 one rank's replica changes (or its update is skipped), and with `repairs` comes back."""
    with group(port) as rank:
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine=engine, digest_every=every)
        last = rank == dist.get_world_size() - 1
        for step in range(12):
            optimizer.zero_grad()
            one_step(ddp, optimizer, Plan(), rank, step)
            if not (skips and last and step == 5):
                optimizer.step()
            if step == 5:
                kept = copy.deepcopy(ddp.module.state_dict())
                FAULTS[fault](ddp, rank)
            if step == 8 and repairs:
                for name, tensor in ddp.module.state_dict().items():
                    tensor.copy_(kept[name])
        dist.barrier()
        session = attachment.session
        session.end()
        return {"engine": attachment.engine, "verdicts": [verdict.kind for verdict in session.verdicts]}


def events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    return [e for e in map(json.loads, (path / "events.jsonl").read_text().splitlines()) if e["kind"] in kinds]


def run(size: int, path: Path, engine: str, fault: str = "nothing", **how: bool) -> list[dict[str, Any]]:
    words = (str(path), engine, fault, how.get("skips", False), how.get("repairs", False))
    on_ranks(size, trains, free_port(), *words, limit_s=LIMIT_S)
    return [event["verdict"] for event in events(path, "verdict")]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_edit_is_found_and_named_with_its_parameter(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "run"
    (verdict,) = run(3, path, engine, "edits")
    assert (verdict["kind"], verdict["ranks"]) == ("diverged", [2])
    evidence = verdict["evidence"]
    assert evidence["parameter"] == "2.bias"
    assert evidence["parameters_differing"] == 1
    assert (evidence["last_agreed_step"], evidence["first_seen_step"]) == (3, 5)
    assert (verdict["since_step"], verdict["detected_step"]) == (4, 5)
    summary = json.loads((path / "summary.json").read_text())
    assert [told["kind"] for told in summary["verdicts"]] == ["diverged"]
    page = (path / "report.html").read_text()
    assert "The replica of rank 2 drifted apart" in page
    assert "2.bias" in page


@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_update_of_one_of_two_ranks(tmp_path: Path, engine: str) -> None:
    (verdict,) = run(2, tmp_path / "run", engine, skips=True)
    assert (verdict["kind"], verdict["ranks"]) == ("diverged", [0, 1])
    assert verdict["evidence"]["parameters_differing"] == verdict["evidence"]["parameters"] == 8
    assert "of two, either may be right" in verdict["cause"]
    assert "optimizer step" in verdict["cause"]


# The sign of a zero is gone after the next update.
@pytest.mark.parametrize(("fault", "parameter", "until"), [("flips_a_sign", "4.weight", 7), ("edits", "2.bias", 9)])
def test_a_sign_of_zero_counts_and_what_is_over_is_said_to_be(
    tmp_path: Path, fault: str, parameter: str, until: int
) -> None:
    path = tmp_path / "run"
    (verdict,) = run(2, path, "native", fault, repairs=fault == "edits")
    assert verdict["evidence"]["parameter"] == parameter
    (over,) = [event["verdict"] for event in events(path, "repaired")]
    assert over["evidence"]["until_step"] == until
    (told,) = json.loads((path / "summary.json").read_text())["verdicts"]
    assert told["evidence"]["until_step"] == until


def test_a_healthy_run_gives_no_verdict(tmp_path: Path) -> None:
    assert run(2, tmp_path / "run", "native") == []


def compares(port: int, path: str, case: str) -> list[str]:
    with group(port) as rank, Said() as said:
        CASES[case](rank, path)
    return said.lines


def only_some_parameters_are_shared(rank: int, path: str) -> None:
    module = build("mlp")
    with torch.no_grad():
        module[2].weight.fill_(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    train(DistributedDataParallel(module), path)


def buffers_differ(rank: int, path: str) -> None:
    train(DistributedDataParallel(build("convolutional"), broadcast_buffers=False), path)


def a_hook_of_their_own(rank: int, path: str) -> None:
    """As local SGD does: gradients stay where they are, so replicas rightly differ."""
    ddp = DistributedDataParallel(build("mlp"))

    def stay(state, bucket):  # DDP reads annotations, and refuses strings
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    attachment = ringside.attach(ddp, run_dir=path, digest_every=1)
    ddp.register_comm_hook(None, stay)
    train(ddp, path, attachment)


def sharded_optimizer(rank: int, path: str) -> None:
    """Its update is done when all ranks have sent their part, after the optimizer's own hooks have run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01)
    train(ddp, path, optimizer=optimizer)


def a_group_of_their_own(rank: int, path: str) -> None:
    """Each rank trains alone, on a group of one; replicas of different groups have nothing in common."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Linear(64, 8), process_group=groups[rank])
    shared = ringside.attach(DistributedDataParallel(build("mlp")), run_dir=path, digest_every=1)
    ringside.attach(ddp, digest_every=1)
    for _ in range(4):
        ddp(torch.randn(4, 64)).sum().backward()
    shared.session.end()


def rank_0_validates_between_steps(rank: int, path: str) -> None:
    ddp, attachment, optimizer = small_attachment(run_dir=path, digest_every=1)
    for _ in range(6):
        steps(ddp, optimizer, rank, 1)
        if rank == 0:
            kept = copy.deepcopy(ddp.module.state_dict())
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.mul_(0.9)  # averaged weights, for validation only
                ddp.module(torch.randn(4, 64))
            ddp.module.load_state_dict(kept)
    dist.barrier()
    attachment.session.end()


def train(
    ddp: DistributedDataParallel, path: str, attachment: Any = None, optimizer: torch.optim.Optimizer | None = None
) -> None:
    attachment = attachment or ringside.attach(ddp, run_dir=path, digest_every=1)
    steps(ddp, optimizer or torch.optim.SGD(ddp.parameters(), lr=0.01), dist.get_rank(), 6)
    dist.barrier()
    attachment.session.end()


CASES: dict[str, Callable[[int, str], None]] = {
    case.__name__: case
    for case in (
        only_some_parameters_are_shared,
        buffers_differ,
        a_hook_of_their_own,
        sharded_optimizer,
        a_group_of_their_own,
        rank_0_validates_between_steps,
    )
}


@pytest.mark.parametrize("case", CASES)
def test_replicas_that_rightly_differ_are_left_alone(tmp_path: Path, case: str) -> None:
    said = on_ranks(2, compares, free_port(), str(tmp_path / "run"), case, limit_s=LIMIT_S)
    assert events(tmp_path / "run", "verdict", "repaired") == []
    assert not [line for lines in said for line in lines if "compared" in line]


# ------------------------------------------------------------------------------------------------ options


def options(port: int, path: str, given: int | None, environment: list[str]) -> list[int]:
    """Return after which training steps digests were taken."""
    taken: list[int] = []
    look = digests.ParameterDigests.digest_parameters

    def listen(self: digests.ParameterDigests, number: int, step: int) -> None:
        taken.append(step)
        look(self, number, step)

    with group(port) as rank, pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests.ParameterDigests, "digest_parameters", listen)
        if environment:
            patch.setenv("RINGSIDE_DIGEST_EVERY", environment[rank])
        ddp, attachment, optimizer = small_attachment(run_dir=path, digest_every=given)
        steps(ddp, optimizer, rank, 10)
        attachment.session.end()
        steps(ddp, optimizer, rank, 10)  # after the end nothing is looked at any more
    return taken


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [(3, [], [0, 2, 5, 8]), (0, [], []), (None, ["4", "0"], [0, 3, 7]), (None, ["0", "4"], []), (2, ["0", "0"], None)],
)
def test_how_often_is_an_option_and_rank_0_decides(
    tmp_path: Path, given: int | None, environment: list[str], expected: list[int] | None
) -> None:
    taken = on_ranks(2, options, free_port(), str(tmp_path / "run"), given, environment, limit_s=LIMIT_S)
    assert taken == [[0, 1, 3, 5, 7] if expected is None else expected] * 2


# ------------------------------------------------------------------------------------------------ what may go wrong


def fails(port: int, path: str) -> tuple[list[str], int]:
    """Rank 1's digests fail at the second look."""
    with group(port) as rank, Said() as said, pytest.MonkeyPatch.context() as patch:
        ddp, attachment, optimizer = small_attachment(run_dir=path, digest_every=1)
        steps(ddp, optimizer, rank, 3)
        if rank == 1:
            patch.setattr(digests, "digest", None)
        steps(ddp, optimizer, rank, 5)
        dist.barrier()
        attachment.session.end()
        return said.about("compared"), attachment.session.clock.step


def test_digests_that_fail_are_dropped_and_said_once(tmp_path: Path) -> None:
    first, second = on_ranks(2, fails, free_port(), str(tmp_path / "run"), limit_s=LIMIT_S)
    assert first == ([], 8)
    assert len(second[0]) == 1
    assert "training goes on" in second[0][0]
    assert second[1] == 8
    assert events(tmp_path / "run", "verdict") == []


def forgets(port: int) -> bool:
    """A model that is gone is not kept alive, and one that is detached is not looked at."""
    with group(port) as rank, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGSIDE_RUN_DIR", os.devnull + "/run")
        ddp, attachment, optimizer = small_attachment(digest_every=1)
        steps(ddp, optimizer, rank, 2)
        gone = weakref.ref(ddp.module[0].weight)
        attachment.detach()
        del ddp, attachment, optimizer
        gc.collect()
        dist.barrier()
        return gone() is None


def test_models_are_not_kept_alive() -> None:
    assert on_ranks(2, forgets, free_port(), limit_s=LIMIT_S) == [True] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_digests_on_a_gpu_are_those_of_the_host() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    named = [(str(dtype), tensor_of(dtype, 3, 4, 5)) for dtype in dtypes]
    named.append(("transposed", tensor_of(torch.float32, 300, 700).t()))
    found = []
    for parameters in (named, [(name, parameter.cuda()) for name, parameter in named]):
        taken = digests.ParameterDigests(dist.HashStore(), 0, parameters, 4)
        assert taken.check(1, 7)
        torch.cuda.synchronize()
        taken.check(2, 8)  # collects what the device had not come to
        (check,), lists = taken.own()
        found.append((check.number, check.step, check.digest, lists))
    assert found[0] == found[1]
