"""Names that users have: kinds of verdicts, metrics, environment variables, entry points, exit statuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.golden.calls import Call
from tests.support.golden import ROOT, Golden

from ringside.commands import VERBS
from ringside.engine.settings import Settings
from ringside.monitor.verdict import KINDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STATUSES = (
    "--version", "", "help", "help nothing", "help report", "nothing", "reprot", "draw rign",
    "predict --preset h100", "nccl-plugin x",
    "demo --inject slwo:rank=1", "report", "report demo", "report data", "report demo --json --markdown",
    "report demo --perfetto t.json --steps 3", "top --once demo", "top --once data", "top --once http:/x",
    "top nothing", "compare demo demo", "compare demo hosts --fail-over 5%", "compare demo hosts --fail-over x",
    "compare demo hosts --warm-up -1", "compare demo hosts --warm-up 1000", "compare demo data", "serve nothing",
    "serve demo --host 0.0.0.0", "bench -n 0", "bench --op median", "bench --op bor", "verify ring --ranks 4",
    "verify nothing", "verify ring --ranks 0", "verify ring --buffers 0", "draw ring", "draw ring -n 0",
    "draw ring -n 4 --text", "draw ring -n 4 -o nowhere/ring.html", "draw ring -n 4 --root 1",
    "draw tree --ranks-per-host 2,2", "draw ring -n 65", "lab", "lab --hosts 0 -- true", "lab --timeout 0 -- true",
    "probe",
    "probe --order x", "probe --timeout 0", "probe -n 1", "doctor demo", "doctor hosts", "doctor data/licences",
    "doctor nothing", "doctor demo --html nowhere/page.html", "predict", "predict --preset none",
    "predict --preset p5 --model 7B", "predict --preset dgx-a100 --hosts 1 --model 7000B", "predict score",
    "predict score nothing", "predict score data/licences/param", "predict simulate ring",
    "predict simulate ring --preset p5 --late 3", "what-if", "what-if demo", "what-if demo --repair 1",
    "what-if demo --repair 9", "what-if nothing --repair 1", "demo --nproc-per-node 1", "demo --steps 0",
    "demo --inject nothing", "demo --kill --steps 29", "demo --corpus nothing", "run", "run --help",
    "run --digest-every x train.py", "run --survive --run-dir x train.py", "run nothing.py",
    "--print-completion csh",
    # on both sides of each limit
    "probe --timeout 0.001", "probe --timeout -1", "compare demo demo --warm-up 0", "compare demo demo --warm-up 100",
    "compare demo demo --warm-up 101", "compare demo hosts --fail-over 0%", "compare demo hosts --fail-over 9999%",
    "compare demo hosts --fail-over 10000%", "compare demo hosts --fail-over -1", "compare demo hosts --fail-over 573",
    "compare demo hosts --fail-over 574", "verify ring --ranks 1-1", "verify ring --ranks 4-3",
    "verify ring --ranks 2,,3", "draw ring -n 64 --text", "draw ring -n 1 --text",
    "draw hierarchical -n 4 --ranks-per-host 2,2 --text",
    "draw hierarchical -n 5 --ranks-per-host 2,2", "draw ring -n 4 --order 0,1", "draw ring -n 4 --order x",
    "draw ring -n 4 --segments 0", "draw binomial_reduce -n 4 --root 3 --text", "draw binomial_reduce -n 4 --root 4",
    "what-if --preset p5 --slow-rank 1=5% --compute-seconds 0", "what-if --preset p5 --slow-rank 1=5% --buckets 0",
    "what-if --preset p5 --bytes 1GB --slow-rank 1=5% --buckets 1 --price 0 --watts 0 --compute-seconds 0.1",
    "what-if --preset p5 --bytes 1GB --sharp --price -1", "what-if --preset p5 --bytes 1GB --sharp --watts -1",
    "what-if --preset p5 --bytes 1GB --to-hosts 0", "what-if --preset p5 --bytes 1GB --slow-link 0:1=0",
    "what-if --preset p5 --bytes 1GB --oversubscribe 0.5", "what-if demo --repair 0 --bytes 1GB",
    "what-if demo --to-hosts 4", "what-if demo --preset p5 --repair 0", "bench -n 257", "bench --iterations -1",
    "bench --rounds -1", "bench --sizes 4,huge", "bench -b 8 -e 4", "bench --step-factor 1", "bench --peers nccl",
    "bench --algorithm butterfly", "bench -d float8", "predict --preset p5 --hosts 0", "predict --preset p5 --bytes 0",
    "predict --preset p5 --model 0", "predict --preset p5 --bytes 1GB --model 7B", "predict --preset p5 --model x",
    "predict --preset p5 --bytes 1GB --algorithm magic", "predict --preset p5 --bytes 1GB --accumulate 0",
    "predict --preset p5 --bytes 1GB --batch-per-rank 0", "predict --preset p5 --topology nothing",
    "predict --topology nothing", "predict --preset p5 --params-from nothing:x", "predict --preset p5 --params-from x",
    "predict simulate ring --preset p5 --late 99=5ms", "predict simulate ring --preset p5 --segments 0",
    "predict simulate nothing --preset p5", "predict score data/bandwidth/h100_2n4g.csv --fit-below 0",
    "predict score data/bandwidth/h100_2n4g.csv --fit-below x", "predict score --fit data/bandwidth/h100_2n4g.csv",
    "demo --kill --steps 30 --nproc-per-node 1", "demo --nproc-per-node 0", "demo --kill --nproc-per-node 1",
    "lab --timeout -1 -- true", "lab --hosts 251 -- true", "lab --ranks-per-host x -- true", "lab --rate x -- true",
    "lab --delay x -- true", "lab --wiring x -- true", "run --survive", "run --nproc-per-node 0 train.py",
    "run --digest-every -1 train.py", "run --digest-every 1.5 train.py", "run -m",
    # what excludes each other, and addresses where nobody answers
    "predict --run demo --bytes 1GB", "predict --run demo --compute-seconds 1", "predict --run nothing",
    "what-if demo --repair 0 --model 1B", "what-if demo --repair 0 --compute-seconds 1",
    "what-if demo --repair 0 --buckets 2",
    "top --once http://127.0.0.1:1", "top --once https://127.0.0.1:1", "top --once http://",
    "predict score --fit a --test b --fit-below 1M", "predict score a --fit b --test c", "draw ring -n 4 --text --svg",

)  # fmt: skip


def test_exit_statuses_are_as_they_were(command: Call, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGSIDE_SERVE_TOKEN", raising=False)
    Path("train.py").write_text("")
    told = [(words, *command(words)) for words in STATUSES]
    lines = (f"{status:3}  ringside {words}\n{_last(error)}" for words, status, _, error in told)
    golden.check("lists/exit-statuses.txt", "".join(lines))
    assert {words.split()[0] for words in STATUSES if words} >= set(VERBS)


def _last(error: str) -> str:
    """The last line on stderr, without the list of choices, which Python's versions quote in their own ways."""
    lines = error.splitlines()
    return f"       {re.sub(r'choice: (.*) [(]choose from .*', r'choice: ...', lines[-1])}\n" if lines else ""


def test_what_a_shell_completes_is_as_it_was(command: Call, golden: Golden) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install 'torch-ringside[completion]'")
    status, script, _ = command("--print-completion bash")
    assert status == 0
    words = [line for line in script.splitlines() if re.match(r"\w+_(option_strings|choices|nargs|COMPGEN)=", line)]
    golden.check("lists/completion.txt", "".join(f"{word}\n" for word in words))


def test_kinds_of_verdicts_are_as_they_were(golden: Golden) -> None:
    golden.check("lists/verdicts.txt", "".join(f"{kind}\n" for kind in KINDS))


def test_environment_variables_are_as_they_were(golden: Golden) -> None:
    sources = [path.read_text() for end in ("py", "cpp") for path in (ROOT / "src" / "ringside").rglob(f"*.{end}")]
    named = {name for text in sources for name in re.findall(r"\bRINGSIDE_[A-Z][A-Z_]*[A-Z]\b", text)}
    named |= {name for text in sources for name in re.findall(r'"(RINGSIDE)"', text)}
    compiled = {"RINGSIDE_TABLE", "RINGSIDE_TABLE_NAME"}  # macros of the kernels
    defaults = {"RINGSIDE_TIMEOUT_S": f" ({Settings().timeout_s!r})"}
    lines = (f"{name}{defaults.get(name, '')}\n" for name in sorted(named - compiled))
    golden.check("lists/environment.txt", "".join(lines))


def test_entry_points_are_as_they_were(golden: Golden) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    points = sorted(f"{group}: {name} = {value}\n" for group, named in groups.items() for name, value in named.items())
    golden.check("lists/entry-points.txt", "".join(points))


def test_every_golden_file_is_smaller_together_than_is_said() -> None:
    sizes = [path.stat().st_size for path in Path(__file__).parent.rglob("*") if path.is_file()]
    assert sum(sizes) < 3 << 20
