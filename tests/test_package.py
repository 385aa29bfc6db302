"""What the package promises as a whole: its public names, its arrows, and that it works without its native core."""

import ast
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ringside
from ringside import _core

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ringside"

WATCHED_SCRIPT = """
import torch, torch.distributed as dist, ringside
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
attachment = ringside.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("ENGINE", attachment.engine, dict(attachment.counters))
attachment.session.end()
dist.destroy_process_group()
"""


def run_python(code, **environ):
    """Run code in a fresh interpreter; return the finished process."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, timeout=120
    )


def imports_of(path):
    """Return every module that a file imports anywhere, for type checkers only excepted."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def rooms(*names):
    """Return the Python files of some rooms of the package."""
    return [path for name in names for path in sorted((SOURCE / name).rglob("*.py"))]


@pytest.mark.skipif("RINGSIDE_REQUIRE_NATIVE" not in os.environ, reason="RINGSIDE_REQUIRE_NATIVE is not set")
def test_the_native_core_was_built():
    assert _core.available(), _core.describe()


def test_public_names():
    assert sorted(ringside.__all__) == [
        "ClosedError",
        "Communicator",
        "DeadlineError",
        "MismatchError",
        "PeerLostError",
        "RingsideError",
        "Run",
        "StoreGoneError",
        "SyncError",
        "UnsupportedError",
        "UsageError",
        "attach",
        "init",
        "log",
        "survive",
    ]
    assert all(getattr(ringside, name) is not None for name in ringside.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ringside.no_such_name


@pytest.mark.parametrize("path", rooms("schedule"), ids=lambda path: path.name)
def test_schedules_import_nothing_of_ours_but_errors(path):
    ours = {name for name in imports_of(path) if name.startswith("ringside")}
    assert all(name.startswith("ringside.schedule") or name == "ringside.errors" for name in ours), ours


@pytest.mark.parametrize(
    ("room", "above"),
    [
        ("engine", ("sync", "monitor", "view", "commands", "demo", "bench", "survive")),
        ("monitor", ("sync", "engine", "commands", "demo", "bench")),
        ("sync", ("view", "commands", "demo", "bench", "survive")),
        ("view", ("commands", "demo", "bench", "sync", "engine")),
        ("survive", ("view", "commands", "demo", "bench", "doctor", "predict", "lab")),
        ("predict", ("sync", "engine", "monitor", "doctor", "survive", "commands", "demo", "bench", "lab")),
    ],
)
def test_arrows_point_one_way(room, above):
    for path in rooms(room):
        wrong = {name for name in imports_of(path) if name.startswith(tuple(f"ringside.{a}" for a in above))}
        assert not wrong, f"{path.relative_to(SOURCE)} imports {wrong}"


def test_torch_is_imported_only_where_pytorch_is_the_point():
    allowed = ("sync/", "engine/transports/", "demo/", "bench/", "autoload/", "integrations/", "survive/", "faults.py")
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(name.split(".")[0] == "torch" for name in imports_of(path))
    }
    assert {user for user in users if not user.startswith(allowed)} == set()


def test_importing_the_engine_and_the_command_line_imports_no_torch():
    result = run_python(
        "import sys, ringside.engine, ringside.commands as c, ringside.monitor, ringside.schedule\n"
        "c.build_parser()\n"
        "assert 'torch' not in sys.modules"
    )
    assert result.returncode == 0, result.stderr


def test_without_the_native_core_attach_only_watches_and_says_so_once(tmp_path):
    result = run_python(
        WATCHED_SCRIPT,
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
    result = run_python(
        "import ringside\n"
        "from ringside.schedule import ring, verify\n"
        "assert verify(ring(5)).ok\n"
        "try:\n    ringside.init()\nexcept ringside.UnsupportedError as error:\n    print(error)",
        RINGSIDE_NO_NATIVE="1",
    )
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
    (wheel,) = tmp_path.glob("ringside-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "ringside/schedule/ring.py" in names
    assert "ringside/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".cpp", ".hpp"))]
