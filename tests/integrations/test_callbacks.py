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
