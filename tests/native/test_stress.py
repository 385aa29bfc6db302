"""The core without Python: ranks as threads, stopped at every point of every path, and under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FLAGS = {
    "stops": "",
    "tsan": "-fsanitize=thread",
    "asan": "-fsanitize=address,undefined",
    "plugin": "-fsanitize=thread",
}


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", _FLAGS)
def test_all_finish_or_all_raise_wherever_a_rank_is_stopped(target: str, tmp_path: Path) -> None:
    """Also that the sanitizers find nothing; `make` builds the program, which takes minutes of C++."""
    if shutil.which("c++") is None or shutil.which("cmake") is None or shutil.which("make") is None:
        pytest.skip("needs a C++ compiler, cmake and make")
    source = tmp_path / "empty.cpp"
    source.write_text("int main() {}\n")
    flags = [*_FLAGS[target].split(), str(source), "-o", str(tmp_path / "empty")]
    if subprocess.run(["c++", *flags], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"this compiler has no {_FLAGS[target]}")
    made = [
        "make",
        "-s",
        "-o",
        ".venv/.ready",
        f"PYTHON={sys.executable}",
        f"BIN={Path(sys.executable).parent}",
        target,
    ]
    ended = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert "WARNING" not in ended.stderr
