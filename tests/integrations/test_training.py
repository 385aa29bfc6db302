"""What the lines of frameworks do in a training of two ranks: models are held as asked, work and loss are recorded.

The frameworks themselves run in `test_callbacks.py` and `test_examples.py`, where they are installed; here something
of the same name stands for them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.pytorch.training import Said, ddp_ranks, group  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringside.integrations import accelerate, models  # noqa: E402
from ringside.integrations.lightning_hooks import Automatic, LightningHooks  # noqa: E402
from ringside.integrations.models import WorkCount  # noqa: E402
from ringside.monitor.run.directory import RunReader  # noqa: E402
from ringside.monitor.run.records import StepRecord  # noqa: E402

STEPS = 3


class Reads(nn.Module):
    """A model of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids).mean()


def step(model: DistributedDataParallel, sentences: int, tokens: int) -> None:
    """A look at the model that trains nothing, and two micro-batches."""
    with torch.no_grad():
        model(input_ids=torch.ones(7, 7, dtype=torch.long))
    for number in range(2):
        with contextlib.nullcontext() if number else model.no_sync():
            model(input_ids=torch.ones(sentences, tokens, dtype=torch.long)).backward()


def records(run: Path) -> list[StepRecord]:
    return sorted(RunReader(run).poll(), key=lambda record: (record.step, record.rank))


def with_accelerate(port: int, run: str) -> list[bool]:
    with group(port):
        model = DistributedDataParallel(Reads())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared = [optimizer, model]
        same = accelerate.attach(prepared, engine="native", run_dir=run, digest_every=0) is prepared
        attachment = accelerate.attachment_of(model)
        for tokens in range(2, 2 + STEPS):
            step(model, 3, tokens)
            optimizer.step()
        assert attachment is not None
        counts = attachment.count_work
        chief = attachment.session.rank0 if attachment.session is not None else None
        compared = [] if chief is None else chief.comparisons  # rank 0 compares, for all
        return [
            same,
            attachment.engine == "gloo",
            compared == [],
            models.hold(model) is attachment,
            attachment.count_work is counts,
        ]


def test_accelerates_models_are_held_and_their_tokens_counted(tmp_path: Path) -> None:
    assert ddp_ranks(2, with_accelerate, str(tmp_path / "run")) == [[True] * 5] * 2
    assert [record.samples for record in records(tmp_path / "run")] == [
        2 * 3 * tokens for tokens in range(2, 2 + STEPS) for _ in range(2)
    ]


def with_transformers(port: int, run: str) -> str:
    stand_in: Any = ModuleType("transformers")
    stand_in.TrainerCallback = type("TrainerCallback", (), {})
    with pytest.MonkeyPatch.context() as patch, group(port):
        patch.setitem(sys.modules, "transformers", stand_in)
        from ringside.integrations.transformers import RingsideCallback

        module = Reads()
        DistributedDataParallel(module)  # as where a trainer is used twice: the newest counts
        model = DistributedDataParallel(module)
        callback = RingsideCallback(run_dir=run)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callback.on_log(None, None, None, logs={"loss": 9.0})  # before it begins: nothing to add it to
        callback.on_train_begin(None, None, None, model=module)
        assert callback.attachment is accelerate.attachment_of(model)
        for number in range(STEPS):
            step(model, 2, 5)
            optimizer.step()
            callback.on_log(None, None, None, logs={"loss": number / 4})
            callback.on_log(None, None, None, logs={"eval_loss": 7.0})
            callback.on_log(None, None, None)
        return str(callback.attachment.engine)


def test_what_a_trainer_of_transformers_logs_is_the_steps_loss(tmp_path: Path) -> None:
    assert ddp_ranks(2, with_transformers, str(tmp_path / "run")) == ["ringside"] * 2
    assert [(record.loss, record.samples) for record in records(tmp_path / "run")] == [
        (number / 4, 2 * 2 * 5) for number in range(STEPS) for _ in range(2)
    ]


def trainer(model: nn.Module, callbacks: Sequence[LightningHooks]) -> Any:
    """What Lightning's callbacks look at."""
    return SimpleNamespace(
        strategy=SimpleNamespace(model=model), callbacks=callbacks, global_rank=0, global_step=0, log_every_n_steps=4,
        accumulate_grad_batches=2,
    )  # fmt: skip


def with_lightning(port: int, run: str) -> None:
    with group(port):
        model = DistributedDataParallel(Reads())
        callbacks = (Automatic(run_dir=run), Automatic())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training, module = trainer(model, callbacks), SimpleNamespace(automatic_optimization=True)
        for callback in callbacks:
            callback.on_fit_start(training, module)
        assert [callback.attachment is None for callback in callbacks] == [False, True]
        for number in range(STEPS):
            step(model, 2, 5)
            optimizer.step()
            for callback in callbacks:
                callback.on_train_batch_end(training, module, {"loss": torch.tensor(number / 4)}, None, number)


def test_lightnings_loss_is_that_of_all_micro_batches(tmp_path: Path) -> None:
    ddp_ranks(2, with_lightning, str(tmp_path / "run"))
    assert [(record.loss, record.samples) for record in records(tmp_path / "run")] == [
        (2 * number / 4, 2 * 2 * 5) for number in range(STEPS) for _ in range(2)
    ]


class OnDevice(torch.Tensor):
    """A loss that takes waiting to read."""

    is_cuda = True  # type: ignore[assignment]


def on_device(loss: float) -> torch.Tensor:
    return torch.tensor(loss).as_subclass(OnDevice)


@pytest.mark.parametrize(
    ("outputs", "at_step", "logged"),
    [
        (torch.tensor(0.5), 1, [1.0]),
        (torch.tensor([0.5]), 1, [1.0]),
        ({"loss": torch.tensor(0.5)}, 1, [1.0]),
        ({"logits": torch.tensor(0.5)}, 1, []),
        (torch.tensor([0.5, 0.5]), 1, []),
        (None, 1, []),
        (0.5, 1, []),
        (on_device(0.5), 7, []),
        (on_device(0.5), 8, [1.0]),
    ],
)
def test_which_of_lightnings_outputs_are_a_loss(outputs: Any, at_step: int, logged: list[float]) -> None:
    callback, told = LightningHooks(), []
    training: Any = trainer(nn.Identity(), [callback])
    training.global_step = at_step
    module = SimpleNamespace(automatic_optimization=True)
    callback.on_train_batch_end(training, module, outputs, None, 0)  # not attached: nobody to tell
    callback.attachment = SimpleNamespace(session=None)  # type: ignore[assignment]
    callback.on_train_batch_end(training, module, outputs, None, 0)
    session = SimpleNamespace(log=lambda loss: told.append(loss))
    callback.attachment = SimpleNamespace(session=session)  # type: ignore[assignment]
    callback.on_train_batch_end(training, module, outputs, None, 0)
    assert told == logged
    module.automatic_optimization = False  # the script divides by itself, or not at all
    callback.on_train_batch_end(training, module, outputs, None, 0)
    training.log_every_n_steps = 0  # never: then each counts
    callback.on_train_batch_end(training, module, outputs, None, 0)
    assert told[len(logged) :] == [loss / 2 for loss in logged] + [0.5] * (logged != [] or at_step == 7)


def test_work_is_summed_over_a_steps_micro_batches_and_only_where_gradients_are_made() -> None:
    told: list[int] = []
    session = SimpleNamespace(clock=SimpleNamespace(step=0), log=lambda samples: told.append(samples))
    count = WorkCount(SimpleNamespace(session=session)).count  # type: ignore[arg-type]
    count((torch.zeros(5, 3),), {})
    count((), {"input_ids": torch.zeros(2, 8)})
    with torch.no_grad():
        count((torch.zeros(50, 3),), {})
    session.clock.step = 1
    count(("no tensor",), {})
    count((torch.zeros(4, 3),), {})
    assert told == [5, 21, 4]
    WorkCount(SimpleNamespace(session=None)).count((torch.zeros(5, 3),), {})  # type: ignore[arg-type]


def what_is_said(port: int) -> list[str]:
    with Said() as said:
        models.watch_groups(nn.Linear(2, 2), None)  # one process trains
        with group(port):
            assert accelerate.attach(nn.Linear(2, 2)) is not None
            LightningHooks().on_fit_start(trainer(nn.Bilinear(2, 2, 2), []), None)
            automatic = Automatic()
            automatic.on_fit_start(trainer(nn.Identity(), [automatic]), None)  # nobody has asked for it
    return [line.partition("this is a ")[2] for line in said.lines]


@pytest.mark.skipif(hasattr(dist.ProcessGroup, "register_pre_hook"), reason="this torch shows every group")
def test_rank_0_says_that_a_model_is_not_watched_where_several_train() -> None:
    words = "{} over gloo"
    assert ddp_ranks(2, what_is_said) == [[words.format("Linear"), words.format("Bilinear")], []]
    assert ddp_ranks(1, what_is_said) == [[]]


class Compiled:
    """What torch.compile returns, as far as it is looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._orig_mod = model


def the_wrappers_found(port: int) -> list[bool]:
    with group(port):
        module, other = nn.Linear(2, 2), nn.Linear(2, 2)
        model = DistributedDataParallel(module)
        return [
            models.ddp_of(model) is model,
            models.ddp_of(Compiled(model)) is model,
            models.ddp_of(module) is None,
            models.ddp_of(Compiled(module)) is None,
            models.wrapper_of(module) is model,
            models.wrapper_of(other) is None,
            models.attachment_of(model) is None,
            models.attachment_of(module) is None,
        ]


def test_a_wrapper_is_found_from_what_is_inside_and_through_a_compiled_one() -> None:
    assert ddp_ranks(1, the_wrappers_found) == [[True] * 8]
