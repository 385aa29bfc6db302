"""A run directory comes from anywhere: nothing in it is executed, and no module of ours could do it by accident."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
from tests.support.modules import modules

from ringside.monitor.run.directory import RunReader
from ringside.monitor.summary import finish_run
from ringside.view.html.run_report import render_report

UNPACKERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
LOADS_PICKLES = {"ringside.doctor.flight_recorder.dump", "ringside.survive.state.torch_checkpoint"}
"""They read PyTorch's dumps and checkpoints, which are pickles, without unpickling what could run (see their tests)."""


def offences(path: Path) -> list[str]:
    """Return what in a module could execute data."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in UNPACKERS]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in RUNNERS or called in ("os.system", "os.popen", "torch.load"):
                found.append(called)
            if words.get("shell") == "True" or words.get("allow_pickle") == "True":
                found.append(ast.unparse(node))
    return found


def test_no_module_could_execute_what_it_reads() -> None:
    seen = {name: offences(path) for name, path in modules().items()}
    assert {name: found for name, found in seen.items() if found} == {name: ["pickle"] for name in LOADS_PICKLES}
    assert len(seen) > 380


def test_the_check_sees_what_it_looks_for(tmp_path: Path) -> None:
    code = "import pickle\nfrom yaml import load\neval('1')\nf(x, shell=True)\nos.system('x')\nre.compile('x')\n"
    (tmp_path / "bad.py").write_text(code)
    assert len(offences(tmp_path / "bad.py")) == 5


def test_a_hostile_run_directory_is_only_read(tmp_path: Path) -> None:
    """Its names and values are code in every language that could be fooled."""
    evil = "$(touch owned)`touch owned`;touch owned\n\"'</script><script>document.title='owned'</script>{{7*7}}%s%n"
    run = {
        "schema": 1, "name": evil, "started_unix": 0.0, "command": [evil], "world_size": 2, "hosts": [evil, evil],
        "pids": [1, 2], "engine": evil, "algorithm": evil, "versions": {evil: evil},
    }  # fmt: skip
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    record = {"rank": 0, "ended_unix": 0.0, "step_seconds": 1.0, "own_seconds": 1.0}
    lines = [msgspec.json.encode({**record, "step": step, "rank": rank}) for step in range(9) for rank in (0, 1)]
    hostile = [
        b'{"step": 1e999}',
        b'{"__class__": "os.system", "step": 3}',
        b"cos\nsystem\n(S'touch owned'\ntR.",
        b"!!python/object",
    ]
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join([*lines, *hostile]) + b"\n")
    verdict = {
        "kind": "slow_rank", "ranks": [1], "since_step": 0, "detected_step": 1, "excess_ratio": 0.5, "cause": evil,
        "evidence": {evil: evil}, "advice": evil,
    }  # fmt: skip
    (tmp_path / "events.jsonl").write_bytes(msgspec.json.encode({"kind": "verdict", "verdict": verdict}) + b"\n")
    summary = finish_run(tmp_path, render_report)
    assert summary["steps"] == 9
    page = (tmp_path / "report.html").read_text()
    assert "<script>document.title" not in page
    assert RunReader(tmp_path).info.name == evil
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events.jsonl", "report.html", "run.json", "steps.jsonl", "summary.json",
    ]  # fmt: skip
