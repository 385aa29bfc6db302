"""An attached model is copied, averaged and saved as any other: nothing of Ringside's lies in it."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.pytorch.training import (  # noqa: E402
    Plan,
    ddp_ranks,
    group,
    one_step,
    run_directory,
    small_attachment,
    steps,
)
from torch import nn  # noqa: E402
from torch._C._distributed_c10d import BuiltinCommHookType  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import ringside  # noqa: E402
from ringside.integrations.models import attachment_of  # noqa: E402

pytestmark = pytest.mark.native

HELD = ("attached", "detached")

LOAD = """
import sys, torch, torch.distributed as dist
for name in {"ringside", *(name for name in sys.modules if name.startswith("ringside."))}:
    sys.modules[name] = None  # an import of it fails, as where it is not installed
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.load(sys.argv[1], weights_only=False)
model(torch.ones(2, 64)).sum().backward()
print(type(model).__name__, all(p.grad is not None for p in model.parameters()))
del model
dist.destroy_process_group()
"""


def copies(port: int, held: str) -> list[Any]:
    """Train, copy, and train the copy and a stock model on; return whether they are the same."""
    with group(port) as rank:
        ddp, attachment, optimizer = small_attachment(monitor=False)
        steps(ddp, optimizer, rank, 3)
        if held == "detached":
            attachment.detach()
        twin = copy.deepcopy(ddp)
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        stock = DistributedDataParallel(copy.deepcopy(ddp.module), bucket_cap_mb=0.01)
        gradients = []
        for model in (twin, saved, stock):
            model_optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(3):
                one_step(model, model_optimizer, Plan(), rank, step)
                model_optimizer.step()
            gradients.append([p.grad for p in model.parameters()])
        alike = [all(map(torch.equal, found, gradients[2])) for found in gradients[:2]]
        steps(ddp, optimizer, rank, 2)
        again = ringside.attach(twin, monitor=False)  # a copy can be attached like any other model
        steps(twin, torch.optim.SGD(twin.parameters(), lr=0.01), rank, 2)
        return [alike, ddp.__dict__.keys() == stock.__dict__.keys(), attachment_of(saved), set(again.counters)]


@pytest.mark.parametrize("held", HELD)
def test_a_copy_and_a_saved_model_train_as_stock_ones(held: str) -> None:
    for alike, same_attributes, found, counters in ddp_ranks(2, copies, held):
        assert alike == [True, True]
        assert same_attributes
        assert found is None
        assert counters
        assert all(name.startswith("ringside/") for name in counters)


def averages(port: int, attach: bool) -> list[torch.Tensor]:
    with run_directory() as path, group(port) as rank:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)))
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.fill_(0.01)
        if attach:
            ringside.attach(ddp, run_dir=path)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        averaged = [AveragedModel(ddp), AveragedModel(ddp, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
        for step in range(4):
            one_step(ddp, optimizer, Plan(), rank, step)
            optimizer.step()
            for one in averaged:
                one.update_parameters(ddp)
        averaged.append(AveragedModel(ddp))  # of one that has trained
        return [parameter.detach().clone() for one in averaged for parameter in one.parameters()]


def test_averages_of_weights_are_those_of_stock_ddp() -> None:
    for stock, attached in zip(ddp_ranks(2, averages, False), ddp_ranks(2, averages, True), strict=True):
        assert all(map(torch.equal, stock, attached))


def saves(port: int, path: str) -> None:
    with run_directory() as run, group(port) as rank:
        ddp, _, optimizer = small_attachment(run_dir=run)
        steps(ddp, optimizer, rank, 3)
        if rank == 0:
            torch.save(ddp, path)


def test_a_saved_model_loads_where_ringside_is_not_installed(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    ddp_ranks(2, saves, path)
    found = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "DistributedDataParallel True\n", found.stderr


class Derived(DistributedDataParallel):
    """A class of the script's own, as frameworks have them."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Derived)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs) * 2


def derives(port: int) -> list[Any]:
    with run_directory() as path, group(port) as rank:
        first, second = (Derived(nn.Linear(64, 8)) for _ in range(2))
        attachment = ringside.attach(first, run_dir=path)
        steps(first, torch.optim.SGD(first.parameters(), lr=0.01), rank, 2)
        assert attachment.session is not None
        stepped = attachment.session.clock.step
        copy.deepcopy(first)
        return [attachment_of(second), attachment_of(first) is attachment, stepped, sum(attachment.counters.values())]


def test_a_derived_class_is_watched_and_told_from_an_equal_one() -> None:
    assert ddp_ranks(2, derives) == [[None, True, 2, 2]] * 2


def forgets(port: int) -> bool:
    with group(port) as rank:
        ddp, attachment, optimizer = small_attachment(monitor=False)
        steps(ddp, optimizer, rank, 2)
        gone = weakref.ref(ddp)
        del ddp, optimizer
        gc.collect()
        attached = attachment.attached
        attachment.detach()
        attachment.detach()
        return gone() is None and not attached


def test_a_hold_does_not_keep_its_model_alive() -> None:
    assert ddp_ranks(2, forgets) == [True, True]


# ------------------------------------------------------------------------------------------------ hooks of the script


def hooks(port: int, builtin: bool) -> list[Any]:
    with group(port) as rank:
        outcomes = []
        for attach in (False, True):
            ddp = DistributedDataParallel(nn.Linear(64, 8), bucket_cap_mb=0.01)
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.fill_(0.01)
            attachment = ringside.attach(ddp, monitor=False) if attach else None
            if builtin:
                ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
            else:
                ddp.register_comm_hook(None, fp16_compress_hook)
            listed = [hook for hook, _ in ddp._comm_hooks]
            if builtin:
                copy.deepcopy(ddp)
            with pytest.raises(RuntimeError, match="only be called once"):
                ddp.register_comm_hook(None, fp16_compress_hook)
            steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), rank, 3)
            outcomes.append([listed, [p.grad.tolist() for p in ddp.parameters()]])
            if attachment is not None:
                outcomes.append(set(attachment.counters))
        return [outcomes[0] == outcomes[1], outcomes[2]]


@pytest.mark.parametrize("builtin", [False, True])
def test_hooks_of_the_script_are_taken_and_refused_as_by_stock_ddp(builtin: bool) -> None:
    assert ddp_ranks(2, hooks, builtin) == [[True, {"hook:fp16_compress_hook"}]] * 2
