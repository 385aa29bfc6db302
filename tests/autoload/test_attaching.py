"""What a rank of `ringside run` gets: its models attached as they are made, and a backend called "ringside"."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.training import Said, ddp_ranks, group  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside_entry  # noqa: E402
from ringside.autoload import ringside_autoload, ringside_backend  # noqa: E402
from ringside.pytorch import attachment_of  # noqa: E402
from ringside.pytorch.recording import session as sessions  # noqa: E402

PR_GET_PDEATHSIG = 2


def signal_of_the_parents_death() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def a_rank(port: int, run: str) -> list[bool]:
    """Install it twice, and make a model."""
    os.environ["RINGSIDE_RUN_DIR"] = run
    ringside_autoload.install()
    made = DistributedDataParallel.__init__
    ringside_autoload.install()
    with group(port):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        attachment = attachment_of(model)
    return [
        DistributedDataParallel.__init__ is made,
        attachment is not None,
        os.environ[ringside_autoload.FIRST] == str(os.getpid()),
        signal_of_the_parents_death() == signal.SIGTERM,
    ]


def test_a_rank_ends_with_its_launcher_and_its_models_are_attached(tmp_path: Path) -> None:
    assert ddp_ranks(2, a_rank, str(tmp_path / "run")) == [[True] * 4] * 2


def what_a_rank_starts() -> tuple[str, int]:
    os.environ[ringside_autoload.FIRST] = "1"
    ringside_autoload.install()
    return os.environ[ringside_autoload.FIRST], signal_of_the_parents_death()


def test_what_a_rank_starts_outlives_it() -> None:
    assert on_ranks(1, what_a_rank_starts) == [("1", 0)]


def two_models_that_are_refused(port: int) -> list[str]:
    os.environ["RINGSIDE_ENGINE"] = "steam"
    ringside_autoload.install()
    with Said() as said, group(port):
        said.setLevel("WARNING")
        for _ in range(2):
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            model(torch.ones(1, 4)).sum().backward()
            assert attachment_of(model) is None
    return said.lines


def test_training_goes_on_where_attaching_fails_and_rank_0_says_it_once() -> None:
    one, *others = ddp_ranks(2, two_models_that_are_refused)
    assert len(one) == 1
    assert one[0].startswith("this model is not watched (UsageError: there is no engine 'steam'")
    assert one[0].endswith("; training goes on without Ringside")
    assert others == [[]]


def watched_by_its_groups(run: str, has_model: bool) -> bool:
    """Train a little over groups that can be watched; tell whether they are, from the first update on."""
    os.environ["RINGSIDE_RUN_DIR"] = run
    ringside_autoload.install()
    here, wait = place(), dist.Work.wait
    dist.init_process_group(
        "ringside", store=dist.FileStore(f"/tmp/{here.job}", here.size), rank=here.rank, world_size=here.size
    )
    layer = torch.nn.Linear(4, 4)
    model = DistributedDataParallel(layer) if has_model else layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    is_watched = dist.Work.wait is not wait
    sessions.current().end()
    dist.destroy_process_group()
    return is_watched


@pytest.mark.native
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "_set_default_backend"), reason="the process group needs torch 2.7")
@pytest.mark.parametrize("has_model", [False, True])
def test_groups_are_watched_where_no_model_is(tmp_path: Path, has_model: bool) -> None:
    assert on_ranks(2, watched_by_its_groups, str(tmp_path / "run"), has_model) == [not has_model] * 2


def registered_anew(how: str) -> list[Any]:
    """Forget the backend, and register it; twice, as torch and `import ringside` do."""
    backend: Any = dist.Backend
    backend.backend_list.remove("ringside")
    for table in (backend._plugins, backend.backend_capability):
        table.pop("ringside".upper() if table is backend._plugins else "ringside")
    del backend.RINGSIDE
    for _ in range(2):
        getattr(ringside_backend, how)()
    plugin = backend._plugins["RINGSIDE"]
    return [
        backend.backend_list.count("ringside"),
        plugin.extended_api,
        plugin.creator_fn is ringside_backend.make,
        backend.backend_capability["ringside"],
    ]


@pytest.mark.parametrize("how", ["register", "offer"])
def test_torch_learns_of_the_backend_once(how: str) -> None:
    assert on_ranks(1, registered_anew, how) == [[1, True, True, ["cpu", "cuda"]]]


def asked_for_gloo(variables: dict[str, str]) -> int:
    """Register the backend anew, and tell how often it was given the groups by the name "gloo"."""
    served: list[Any] = []
    for name in ("RINGSIDE", "RINGSIDE_AS_GLOO"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringside_backend, "serve_gloo", served.append)
        registered_anew("register")
    return len(served)


@pytest.mark.parametrize(
    ("variables", "serves"),
    [
        ({}, False),
        ({"RINGSIDE_AS_GLOO": ""}, False),
        ({"RINGSIDE_AS_GLOO": "0"}, False),
        ({"RINGSIDE_AS_GLOO": "OFF"}, False),
        ({"RINGSIDE_AS_GLOO": "1"}, True),
        ({"RINGSIDE_AS_GLOO": "1", "RINGSIDE": "monitor"}, True),
        ({"RINGSIDE_AS_GLOO": "1", "RINGSIDE": "Off"}, False),
        ({"RINGSIDE_AS_GLOO": "1", "RINGSIDE": "0"}, False),
    ],
)
def test_gloo_is_served_where_that_is_asked_for_and_ringside_is_not_off(
    variables: dict[str, str], serves: bool
) -> None:
    assert on_ranks(1, asked_for_gloo, variables) == [int(serves)]


@pytest.mark.parametrize(("asked", "loads"), [("", 0), ("0", 0), ("off", 0), ("OFF", 0), ("1", 1)])
def test_where_torch_finds_the_backend_it_is_loaded_for_gloo_alone(
    monkeypatch: pytest.MonkeyPatch, asked: str, loads: int
) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(dist.Backend, "_ensure_backend_registered", lambda name: None, raising=False)
    monkeypatch.setattr(ringside_backend, "register", lambda: loaded.append(1))
    monkeypatch.setenv("RINGSIDE_AS_GLOO", asked)
    ringside_entry.register()
    assert len(loaded) == loads


def test_a_torch_without_process_groups_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != ringside_backend.TARGET})
    ringside_backend.register()
    assert ringside_backend.TARGET not in sys.modules


def group_of_one() -> str:
    os.environ["MASTER_PORT"] = "0"
    dist.init_process_group("ringside", store=dist.HashStore(), rank=place().rank, world_size=1)
    try:
        return str(dist.get_backend())
    finally:
        dist.destroy_process_group()


def test_a_group_of_ours_is_made_by_its_name() -> None:
    assert on_ranks(1, group_of_one) == ["ringside"]
