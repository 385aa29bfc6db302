"""What the package promises as a whole: its public names, its arrows, and that it works without its native core."""

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from tests.support.modules import imports_of, is_in, modules, tree_of

import ringside

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ringside"

MAY_IMPORT = {
    "_core": [],
    "autoload": ["pytorch"],
    "bench": ["_core", "engine"],
    "commands": [
        "_core",
        "bench",
        "demo",
        "doctor",
        "engine",
        "faults",
        "lab",
        "launch",
        "monitor",
        "predict",
        "pytorch",
        "schedule",
        "view",
    ],
    "demo": ["engine", "faults", "monitor", "pytorch", "survive"],
    "doctor": ["monitor"],
    "engine": ["_core", "schedule"],
    "faults": [],
    "integrations": ["monitor", "pytorch", "view"],
    "lab": [],
    "launch": ["monitor", "view"],
    "monitor": [],
    "predict": ["schedule"],
    "pytorch": ["_core", "autoload", "engine", "monitor", "schedule", "view"],
    "schedule": [],
    "survive": ["engine", "launch", "pytorch", "schedule"],
    "view": ["doctor", "monitor", "predict", "schedule"],
}
"""The arrows of ARCHITECTURE.md: which other packages of ours, each may import."""
ENTRANCES = {
    "_core": "enums numpy_kernels",
    "autoload": "after_import ringside_backend",
    "bench": "launch messages peers plan result",
    "commands": "",
    "demo": "corpus reveal size",
    "doctor": "calls.follow examine files.source findings kineto.straggler ringside_run",
    "engine": (
        "algorithm buffers collectives communicator cost.network dtypes net.attribution net.collectives "
        "net.exchange.block_scaling net.exchange.device net.exchange.exchange net.exchange.plan net.exchange.run "
        "net.exchange.signature net.exchange.wire net.hierarchical net.context net.rank_map net.reduction "
        "probe.links probe.prober probe.reachability request runtime.interrupts runtime.queue "
        "runtime.worker settings shm.communicator shm.log shm.memory topology transports.base transports.gloo "
        "transports.gloo_all_reduce tuner.drift tuner.explain tuner.selector"
    ),
    "faults": "inject quota",
    "integrations": "",
    "lab": "wiring",
    "launch": "follow torchrun",
    "monitor": (
        "alerts.book alerts.counters alerts.live assessment collector device_marks groups hang.attribution "
        "hang.detector intervals job.collectives job.questions links.sampler nccl.attribution "
        "nccl.report nccl.ring nccl.watch price replicas run.directory run.records run.registry run.table "
        "slow_rank.detector slow_rank.watcher slow_rank.window_test stats step_clock "
        "summary undecided verdict vitals.gpu vitals.process wait_meter"
    ),
    "predict": (
        "fit laws.calibrate laws.knowledge plan.advice plan.buckets plan.memory plan.options plan.plan plan.step "
        "score simulation.simulate simulation.timeline tables tables.table "
        "topology.files topology.topology what_if"
    ),
    "pytorch": (
        "job_probe process_group.as_gloo process_group.carrier process_group.collectives process_group.creation "
        "recording.parameter_digests recording.session shared_storage"
    ),
    "schedule": "algorithms.doubling algorithms.hierarchical algorithms.ring combine",
    "survive": "",
    "view": (
        "export.markdown export.perfetto export.prometheus html.doctor html.predictions html.run_report "
        "html.simulation mesh_text predict_text run.comparison run.follower run.live run.recorded "
        "run.training_step schedule.drawing schedule.text server.app server.feed server.guard terminal tui.app "
        "tui.console tui.rank_table tui.source tui.text verdict_text"
    ),
}
"""Of each package, the modules (beside the package itself) that modules outside of it import: no others may be."""
IMPORT_TORCH = [
    "ringside.bench.peers",
    "ringside.demo",
    "ringside.engine.net.exchange.device",
    "ringside.engine.transports",
    "ringside.fsdp",
    "ringside.integrations",
    "ringside.survive",
    "ringside.pytorch",
]


def run_python(name, **environ):
    """Run a script in a fresh interpreter; return the finished process."""
    script, env = Path(__file__).parent / "scripts" / name, {**os.environ, **environ}
    return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)


def package_of(name):
    """Return the first part of a module of ours below ringside, where that is a package; else nothing."""
    top, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return first if top == "ringside" and first and modules()[f"{top}.{first}"].name == "__init__.py" else ""


def test_public_names():
    assert sorted(ringside.__all__) == [
        "Attachment",
        "ClosedError",
        "Communicator",
        "DeadlineError",
        "GroupCommunicator",
        "HostCommunicator",
        "MismatchError",
        "PeerLostError",
        "RingsideError",
        "Run",
        "StoreGoneError",
        "SyncError",
        "UnsupportedError",
        "UsageError",
        "Verdict",
        "Work",
        "attach",
        "communicator",
        "init",
        "log_step",
        "survive",
        "watch",
    ]
    assert all(getattr(ringside, name) is not None for name in ringside.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ringside.no_such_name


def test_the_layout_is_read_from_every_file_of_the_package():
    assert set(modules().values()) == set(SOURCE.rglob("*.py"))
    assert len(modules()) > 380
    assert set(MAY_IMPORT) == {package for package in map(package_of, modules()) if package}


def test_arrows_point_one_way():
    """What lies in no package (`ringside.errors`, `ringside.files`, ...) is for all."""
    wrong = set()
    for package, others in MAY_IMPORT.items():
        seen = modules(f"ringside.{package}")
        assert len(seen) >= 2, f"where have the modules of {package} gone?"
        wrong |= {
            f"{name} imports {found}"
            for name, path in seen.items()
            for found in imports_of(name, path)
            if package_of(found) not in ("", package, *others)
        }
    assert wrong == set()


def test_a_package_is_entered_where_it_says():
    entered = {package: set() for package in MAY_IMPORT}
    for name, path in modules().items():
        for found in imports_of(name, path):
            package = package_of(found)
            if package and package != package_of(name):
                entered[package].add(found.removeprefix(f"ringside.{package}").lstrip("."))
    assert {package: found - {""} for package, found in entered.items()} == {
        package: set(names.split()) for package, names in ENTRANCES.items()
    }


def test_the_package_needs_nothing_of_the_repository_beside_it():
    """Which lies not in a wheel: `verification`, `tests`, `bench`, `docs`."""
    beside = ["verification", "tests", "bench", "docs", "examples"]
    wrong = {
        f"{name} imports {found}"
        for name, path in modules().items()
        for found in imports_of(name, path)
        if is_in(found, beside)
    }
    assert not wrong, wrong
    assert all((ROOT / folder).is_dir() for folder in beside)


def test_what_is_imported_from_a_package_itself_is_in_its_list():
    """Its `__all__`, where it has one; of submodules the test above tells."""
    listed = ((name, own_list(path)) for name, path in modules("ringside").items() if package_of(name))
    lists = {name: names for name, names in listed if names is not None}
    assert len(lists) >= 8
    wrong = []
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module in lists
                and package_of(name) != package_of(node.module)
            ):
                names = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in modules()}
                wrong += [f"{name} imports {one} from {node.module}" for one in names - lists[node.module]]
    assert wrong == []


def own_list(path):
    """Return what a package says in `__all__` that it holds; None: it says nothing."""
    for node in tree_of(path).body if path.name == "__init__.py" else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def test_schedules_import_nothing_of_ours_but_errors():
    seen = modules("ringside.schedule")
    for name, path in seen.items():
        ours = {found for found in imports_of(name, path) if is_in(found, ["ringside"])}
        assert all(is_in(found, ["ringside.schedule", "ringside.errors", "ringside.text"]) for found in ours), (
            name,
            ours,
        )
    assert len(seen) >= 10


def test_torch_is_imported_only_where_pytorch_is_the_point():
    users = {name for name, path in modules().items() if any(is_in(one, ["torch"]) for one in imports_of(name, path))}
    assert {user for user in users if not is_in(user, IMPORT_TORCH)} == set()
    assert {place for place in IMPORT_TORCH if not any(is_in(user, [place]) for user in users)} == set()


def test_every_form_of_an_import_is_seen(tmp_path):
    code = """
        import json, torch.nn as nn
        from torch import distributed
        from ringside import pytorch as sync, __version__
        from ringside import text as units
        from ringside.errors import UsageError
        from . import runner
        from .. import lab
        from ..monitor.run.records import StepRecord
        if typing.TYPE_CHECKING:
            from ringside import survive
        else:
            def later():
                from ringside import predict
                importlib.import_module("ringside.doctor")
    """
    wanted = (
        "json torch.nn torch ringside.pytorch ringside ringside.text ringside.errors ringside.bench ringside.lab "
        "ringside.monitor.run.records ringside.predict ringside.doctor"
    )
    (tmp_path / "module.py").write_text(textwrap.dedent(code))
    assert imports_of("ringside.bench.module", tmp_path / "module.py") == set(wanted.split())


def test_importing_the_engine_and_the_command_line_imports_no_torch():
    result = run_python("imports_no_torch.py")
    assert result.returncode == 0, result.stderr


def test_without_the_native_core_attach_only_watches_and_says_so_once(tmp_path):
    result = run_python(
        "watched.py",
        RINGSIDE_NO_NATIVE="1",
        RINGSIDE_RUN_DIR=str(tmp_path / "run"),
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    assert result.returncode == 0, result.stderr
    assert "ENGINE gloo {'gloo': 3}" in result.stdout
    assert result.stderr.count("only watches") == 1
    assert "native core" in result.stderr
    assert (tmp_path / "run" / "summary.json").exists()


def test_without_the_native_core_schedules_work_and_init_says_what_to_do():
    result = run_python("without_core.py", RINGSIDE_NO_NATIVE="1")
    assert result.returncode == 0, result.stderr
    assert "C++17 compiler" in result.stdout


def test_a_wheel_without_the_native_core_is_pure(tmp_path):
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed here")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run(
        [*command, str(ROOT)],
        env={**os.environ, "RINGSIDE_NO_NATIVE": "1"},
        check=True,
        timeout=150,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (wheel,) = tmp_path.glob("torch_ringside-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "ringside/schedule/algorithms/ring.py" in names
    assert "ringside/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".cpp", ".hpp"))]
    assert "ringside/_core/enums.def" in names
    assert {path.name for path in map(Path, names) if "licenses" in path.parts} == {
        "LICENSE",
        "nanobind.txt",
        "robin-map.txt",
    }
