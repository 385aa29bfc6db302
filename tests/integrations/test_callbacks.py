"""What callbacks do where there is nothing to attach, where somebody else attaches, and where a package is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.integrations.frameworks import entry_points  # noqa: E402

from ringside.errors import UsageError  # noqa: E402
from ringside.integrations import (  # noqa: E402
    accelerate,
    lightning_hooks,
    models,
    package,
)
from ringside.integrations.accelerate import attach, attachment_of  # noqa: E402
from ringside.integrations.lightning_hooks import Automatic, LightningHooks  # noqa: E402


def trainer(*callbacks: LightningHooks) -> Any:
    """Return what callbacks look at of a trainer that uses DDP."""
    return SimpleNamespace(callbacks=list(callbacks), strategy=SimpleNamespace(model="ddp"), global_rank=0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take down every model that would have been attached."""
    taken: list[Any] = []
    monkeypatch.setattr(lightning_hooks, "ddp_of", lambda model: model if model == "ddp" else None)
    monkeypatch.setattr(models, "hold", lambda model, **wishes: taken.append((model, wishes)))
    return taken


def fit(training: Any) -> None:
    for callback in training.callbacks:
        callback.on_fit_start(training, None)


def test_the_callback_that_lightning_finds_attaches(held: list[Any]) -> None:
    fit(trainer(Automatic(), Automatic()))
    assert [model for model, _ in held] == ["ddp"]


def test_it_gives_way_to_the_scripts_own(held: list[Any]) -> None:
    fit(trainer(Automatic(), LightningHooks(engine="native")))
    assert held == [("ddp", {"engine": "native", "run_dir": None, "digest_every": None})]


def test_it_never_ends_a_training(monkeypatch: pytest.MonkeyPatch, held: list[Any], caplog: Any) -> None:
    def breaks(model: Any, **wishes: Any) -> None:
        raise UsageError("there is no engine 'x'")

    monkeypatch.setattr(models, "hold", breaks)
    fit(trainer(Automatic()))
    assert "there is no engine 'x'" in caplog.text
    with pytest.raises(UsageError, match="no engine"):
        fit(trainer(LightningHooks()))


def test_a_training_that_is_not_watched_is_told_of_on_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, held: list[Any], caplog: Any
) -> None:
    def breaks(model: Any, **wishes: Any) -> None:
        raise UsageError("there is no engine 'x'")

    monkeypatch.setattr(models, "hold", breaks)
    training = trainer(Automatic())
    for training.global_rank in (0, 1):
        with caplog.at_level(logging.DEBUG):
            fit(training)
    said = "this training is not watched (UsageError: there is no engine 'x'); it goes on"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", said),
        ("DEBUG", said),
    ]


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def losses_of(callback: Any) -> list[float]:
    """Give a callback the hold on a model, and return what it logs there."""
    logged: list[float] = []
    callback.attachment = SimpleNamespace(session=SimpleNamespace(log=lambda loss: logged.append(loss)))
    return logged


def test_lightnings_loss_is_that_of_the_whole_step_and_on_a_gpu_read_as_often_as_it_logs() -> None:
    callback, training = (
        LightningHooks(),
        SimpleNamespace(global_step=6, log_every_n_steps=3, accumulate_grad_batches=4),
    )
    module, loss = SimpleNamespace(automatic_optimization=True), torch.tensor(0.5)

    def told(outputs: Any) -> None:
        callback.on_train_batch_end(training, module, outputs, None, 0)

    told(loss)  # nothing is attached
    logged = losses_of(callback)
    for outputs in (loss, {"loss": loss}, torch.tensor([0.5]), torch.zeros(2), 0.5, None, {}):
        told(outputs)
    assert logged == [2.0, 2.0, 2.0], "it was divided by the four micro-batches"
    module.automatic_optimization = False
    told(loss)
    assert logged[3:] == [0.5]
    for training.global_step, training.log_every_n_steps in ((6, 3), (7, 3), (7, 1), (7, 0)):
        told(loss.as_subclass(OnGpu))
    assert logged[4:] == [0.5, 0.5, 0.5], "not at step 7 of every third"
    callback.attachment = SimpleNamespace(session=None)
    told(loss)
    assert len(logged) == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_lightnings_loss_on_a_gpu_is_read_as_often_as_it_logs() -> None:
    callback, logged = LightningHooks(), []
    callback.attachment = SimpleNamespace(session=SimpleNamespace(log=lambda loss: logged.append(loss)))
    training = SimpleNamespace(log_every_n_steps=50, accumulate_grad_batches=1)
    module, loss = SimpleNamespace(automatic_optimization=True), torch.tensor(0.5, device="cuda")
    for training.global_step in range(101):
        callback.on_train_batch_end(training, module, {"loss": loss}, None, 0)
    assert logged == [0.5, 0.5, 0.5]


def test_the_trainers_loss_is_logged_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))
    monkeypatch.delitem(sys.modules, "ringside.integrations.transformers", raising=False)
    callback = importlib.import_module("ringside.integrations.transformers").RingsideCallback()
    del sys.modules["ringside.integrations.transformers"]
    callback.on_log(None, None, None, logs={"loss": 0.5})  # nothing is attached
    logged = losses_of(callback)
    for logs in ({"loss": "0.5"}, {"loss": 0.0}, {"eval_loss": 1.0}, {}, None):
        callback.on_log(None, None, None, logs=logs)
    assert logged == [0.5, 0.0]
    callback.attachment = SimpleNamespace(session=None)
    callback.on_log(None, None, None, logs={"loss": 0.5})
    assert logged == [0.5, 0.0]
    taken: list[Any] = []
    monkeypatch.setattr(callback, "attach_model", lambda *given: taken.append(given))
    model = torch.nn.Linear(2, 2)
    callback.on_train_begin(None, None, None, model=model)
    assert taken == [(model, None)]


def test_of_what_accelerate_prepared_every_model_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(accelerate, "ddp_of", lambda thing: thing if thing in ("one", "two") else None)
    monkeypatch.setattr(accelerate, "hold", lambda model, **wishes: taken.append((model, wishes)))
    monkeypatch.setattr(
        accelerate, "watch_groups", lambda model, run_dir: taken.append((type(model).__name__, run_dir))
    )
    wishes = {"engine": "native", "run_dir": "runs/x", "digest_every": 7}
    attach(["one", torch.nn.Linear(2, 2), "two", 3], **wishes)
    assert taken == [("one", wishes), ("Linear", "runs/x"), ("two", wishes)]


def test_lightning_finds_no_callback_where_ringside_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, found in (("off", False), ("OFF", False), ("0", False), ("", True), ("1", True)):
        monkeypatch.setenv("RINGSIDE", value)
        assert lightning_hooks.is_automatic() is found
    monkeypatch.delenv("RINGSIDE")
    assert lightning_hooks.is_automatic()


def test_on_one_process_nothing_happens(caplog: Any) -> None:
    model = torch.nn.Linear(2, 2)
    prepared = (model, "optimizer")
    with caplog.at_level(logging.WARNING):
        assert attach(prepared) is prepared
        assert attach(model) is model
    assert attachment_of(model) is None
    assert models.wrapper_of(model) is None
    assert caplog.text == ""


@pytest.mark.parametrize("group", [group for group in entry_points() if group.endswith(".callbacks_factory")])
def test_entry_points_give_callbacks(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    framework = group.rpartition(".")[0]
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    (entry,) = (importlib.metadata.EntryPoint(name, value, group) for name, value in entry_points()[group].items())
    monkeypatch.delenv("RINGSIDE", raising=False)
    (callback,) = entry.load()()
    assert isinstance(callback, importlib.import_module(framework).Callback)
    assert isinstance(callback, Automatic)
    monkeypatch.setenv("RINGSIDE", "off")
    assert entry.load()() == []


@pytest.mark.parametrize(
    ("module", "pip"),
    [("transformers", "transformers"), ("lightning", "lightning"), ("pytorch_lightning", "pytorch-lightning")],
)
def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, module: str, pip: str) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"ringside.integrations.{module}", raising=False)
    with pytest.raises(UsageError) as raised:
        importlib.import_module(f"ringside.integrations.{module}")
    assert str(raised.value) == (
        f"ringside.integrations.{module} needs {pip}, which is not installed: pip install {pip}"
    )


def test_a_package_that_lacks_something_of_its_own_says_what(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_there.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        package("half_there")
