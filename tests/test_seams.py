"""The tests survive that code of ours is moved: they touch no insides, hide no scripts in strings, share helpers."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.support.modules import modules, tree_of

# Of a lint's kind, over every source: `make test-all` has them.
pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("tests", "bench", "examples", "verification")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "test_seams.py"  # which holds what its checks look for
}

STAY = {
    ("bench/survive/workers.py", "_driver"): "what a step's time went to, and where to be killed: of no use to users",
    ("tests/engine/test_message_rounds.py", "_enter_round"): "when a round is entered: it shows in no result",
    ("tests/engine/test_message_rounds.py", "_send"): "what is known when a message leaves: it shows in no result",
    ("tests/engine/test_turns.py", "_guard"): "what must hold while another thread, or a finalizer, is inside it",
    ("tests/survive/test_together.py", "_driver"): "what a leader decides by itself, told when a step says so",
    (
        "tests/pytorch/test_marked_times.py",
        "_unreached",
    ): "called without a pause, against graphs captured on a GPU",
    ("tests/pytorch/test_rehearsal.py", "_between"): "a rehearsal is no call of a user's",
}
"""The underscored names of ours that tests touch, ten at most, each with its reason."""
OTHERS = {
    ("tests/hostile/test_models_that_are_copied.py", "_register_builtin_comm_hook"): "DDP's",
    ("tests/hostile/test_timeouts_of_the_group.py", "_set_pg_timeout"): "torch.distributed's",
    ("tests/integrations/test_debug_server.py", "_server"): "of PyTorch's debug server",
    ("tests/pytorch/test_attach.py", "_timeout"): "of torch's options of a backend",
    ("tests/pytorch/test_group_watch.py", "_register_process_group"): "torch.distributed's",
    ("tests/pytorch/test_process_group_backend.py", "_timeout"): "of torch's options of a backend",
    ("tests/pytorch/test_process_group_calls.py", "_set_pg_timeout"): "torch.distributed's",
    ("tests/pytorch/test_process_group_devices.py", "_end_coalescing"): "a torch process group's",
    ("tests/pytorch/test_process_group_devices.py", "_start_coalescing"): "a torch process group's",
    ("tests/pytorch/test_process_group_frameworks.py", "_buffers"): "a torch module's",
    ("tests/pytorch/test_process_group_stock.py", "_register_builtin_comm_hook"): "DDP's",
    ("tests/pytorch/test_process_group_stock.py", "_set_pg_timeout"): "torch.distributed's",
    ("tests/support/zygote.py", "_fd"): "multiprocessing's tracker of resources",
    ("tests/view/test_notebook.py", "_esm"): "anywidget's",
    ("tests/view/test_top_app.py", "_driver"): "a textual app's",
    ("tests/zoo/scripts/own_hook.py", "_register_builtin_comm_hook"): "DDP's",
}
"""Names that libraries have, and we too."""
HOLD_SCRIPTS = {
    "tests/test_package.py": "what is given to the finder of imports",
}
"""The files in which text may look like a script of ours."""
SHARED = {"until", "free_port", "Clock", "own_times", "slow_run", "records_of", "run_info", "Said"}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: tree_of(path) for name, path in SOURCES.items()}


class Own:
    """What our package holds, read once.

    Attributes:
        insides: Underscored names that it gives to anything: functions, classes, variables, attributes.
        constants: Names of constants, each as (module, name).
        copies: Modules that import a name from another one, by (module, name).
    """

    def __init__(self) -> None:
        names: set[str] = set()
        self.constants: set[tuple[str, str]] = set()
        self.copies: dict[tuple[str, str], list[str]] = {}
        for module, path in modules().items():
            tree = tree_of(path)
            for node in tree.body:
                if isinstance(node, ast.Assign):
                    self.constants |= {(module, one.id) for one in node.targets if isinstance(one, ast.Name)}
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
                elif isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        self.copies.setdefault((node.module or "", alias.name), []).append(module)
        self.insides = {n for n in names if n.startswith("_") and not n.endswith("_")} - {"_core", "_"}


@cache
def own() -> Own:
    return Own()


def touched(tree: ast.AST) -> Iterator[str]:
    """Yield underscored names of ours that code touches on anything but itself: also in its strings, and by string."""
    insides = own().insides
    itself = {"self", "cls", *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))}
    for node in ast.walk(tree):
        names: Iterable[object] = ()
        if isinstance(node, ast.Attribute):
            if node.attr in insides and not (isinstance(node.value, ast.Name) and node.value.id in itself):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            names = (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("setattr", "getattr", "hasattr", "delattr"):
            names = (word.value for word in node.args if isinstance(word, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
            if re.fullmatch(r"ringside[\w.]*[.:][\w.]*", node.value):
                names = re.split(r"[.:]", node.value)
            elif "\n" in node.value and "._" in node.value and (inner := parsed(node.value)) is not None:
                yield from touched(inner)
        yield from (name for name in names if isinstance(name, str) and name in insides)


def called(node: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return None


def imported_as(tree: ast.Module) -> dict[str, str]:
    """Return the names by which code knows modules of ours."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in found.items() if full in modules()}


def assigned(tree: ast.Module) -> Iterator[str]:
    """Yield what code assigns to in modules of ours: if the name has moved, it makes a new one, and changes nothing."""
    names = imported_as(tree)
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        for target in (one for pattern in targets for one in ast.walk(pattern)):
            if not isinstance(target, ast.Attribute) or isinstance(target.ctx, ast.Load):
                continue  # `os.environ[module.NAME] = ...` looks the name up
            if ast.unparse(target.value) in names:
                yield ast.unparse(target)


def test_the_insides_of_the_package_are_left_alone() -> None:
    found = {(name, inside) for name, tree in trees().items() for inside in touched(tree)}
    assert found - STAY.keys() - OTHERS.keys() == set()
    assert (STAY.keys() | OTHERS.keys()) - found == set(), "excuses that nobody needs any more"
    assert len(STAY) <= 10
    assert len(trees()) > 400
    assert len(own().insides) > 1000


def test_modules_are_patched_so_that_a_name_that_has_moved_is_an_error() -> None:
    """By `monkeypatch.setattr`; that dotted names lead to something is in test_imports.py."""
    assert {name: found for name, tree in trees().items() if (found := list(assigned(tree)))} == {}


def patched_constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of constants of ours that are given to `setattr`."""
    names = imported_as(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "setattr":
            words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            module, _, name = str(words[0]).rpartition(".") if words else ("", "", "")
            module = module or names.get(ast.unparse(node.args[0]), "")
            if module in modules() and name.isupper():
                yield module, name


def test_a_constant_that_is_patched_is_one_that_everybody_looks_up_there() -> None:
    """It is made in that module, and no other module has taken a copy of it."""
    patched = {found: name for name, tree in trees().items() for found in patched_constants(tree)}
    assert {found: test for found, test in patched.items() if found not in own().constants} == {}, (
        "it is made elsewhere"
    )
    assert {found: own().copies[found] for found in patched if found in own().copies} == {}, "others have a copy"
    assert len(patched) >= 8


def test_scripts_are_files() -> None:
    """Which lint and types see, and whoever renames something."""
    holds = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if name.startswith("tests/") and isinstance(node, ast.Constant) and isinstance(node.value, str)
        if "\n" in node.value and re.search(r"(?m)^\s*(import\b.*\bringside\b|from ringside\b.* import )", node.value)
    }
    assert holds == set(HOLD_SCRIPTS)


def test_no_test_imports_from_another_test_or_from_a_conftest() -> None:
    wrong = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                if (node.level or words[0] == "tests") and any(re.fullmatch(r"test_\w+|conftest", w) for w in words):
                    wrong.append(f"{name}: {ast.unparse(node)}")
    assert wrong == []


def test_there_is_one_of_each_helper_that_many_use() -> None:
    made = [
        (node.name, name)
        for name, tree in trees().items()
        if name.startswith("tests/")
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in SHARED
    ]
    assert len(made) == len({name for name, _ in made}) == len(SHARED), sorted(made)


def test_the_native_core_is_asked_for_by_the_marker() -> None:
    for name, tree in trees().items():
        skips = [
            ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "skipif"
        ]
        assert not [skip for skip in skips if "_core" in skip], f"{name}: pytest.mark.native says that"


@pytest.mark.parametrize(
    "code",
    [
        "selector._prober.most(1)",
        "from ringside.engine.runtime.queue import _nothing",
        "monkeypatch.setattr(selector, '_prober', None)",
        "getattr(x, '_prober')",
        "WHERE = 'ringside.engine.tuner.selector:Selector._prober'",
        "SCRIPT = '''\nimport os\nprint(selector._prober)\n'''",
    ],
)
def test_the_check_sees_what_it_looks_for(code: str) -> None:
    assert len(list(touched(ast.parse(code)))) == 1


def test_the_check_leaves_alone_what_is_not_ours() -> None:
    code = "self._prober = 1\nos._exit(0)\nrun._repr_html_()\nringside._core.available()\n"
    assert list(touched(ast.parse(code))) == []


def test_an_assignment_to_a_module_is_seen() -> None:
    code = """
        from ringside.monitor.hang import attribution as hang_judge
        import ringside.monitor.links.sampler as links
        hang_judge.LIMIT_S = links.PERIOD_S = 1.0
        other.LIMIT_S = hang_judge.LIMIT_S
    """
    assert sorted(assigned(ast.parse(textwrap.dedent(code)))) == ["hang_judge.LIMIT_S", "links.PERIOD_S"]
