"""What `--print-completion` prints, read by the shells themselves, and docs/commands.md, made from the same parsers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs.generate.commands import handbook

from ringside.commands import SHELLS, VERBS, main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
# What bash does when somebody presses Tab: the words so far, the last of them not ended.
ASK = 'source "$1"; shift; COMP_WORDS=(ringside "$@"); COMP_CWORD=$#; _shtab_ringside; printf "%s\\n" "${COMPREPLY[@]}"'


def test_the_page_of_commands_says_what_help_says() -> None:
    assert PAGE.read_text() == handbook(), "run `python -m docs.generate.commands > docs/commands.md`"
    assert re.findall(r"^## ringside (\w[\w-]*)$", PAGE.read_text(), re.MULTILINE) == list(VERBS)


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Have the script for a shell printed; return where it lies."""
    pytest.importorskip("shtab", reason="shtab is not installed: pip install 'torch-ringside[completion]'")
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code in (0, None)
    path = folder / f"ringside.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_flags_choices_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("bash", tmp_path, capsys)
    (tmp_path / "train.py").touch()

    def completed(*words: str) -> set[str]:
        command = ["bash", "--norc", "-c", ASK, "bash", str(path), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        return set(done.stdout.split())

    assert completed("re") == {"report"}
    assert completed("top", "--sort", "w") == {"wait", "wire"}
    assert completed("report", "--per") == {"--perfetto"}
    assert completed("run", "--nn") == {"--nnodes"}
    assert completed("run", "--nproc-per-node", "2", "tr") == {"train.py"}
    assert completed("run", "--on") == {"--on-verdict"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_every_verb_in_a_script_it_can_read(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(shell, tmp_path, capsys)
    assert [verb for verb in VERBS if verb not in path.read_text()] == []
    if shutil.which(shell) is not None:
        read = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, timeout=60)
        assert (read.returncode, read.stderr) == (0, "")


def test_without_shtab_one_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err == "ringside: shell completion needs shtab: pip install 'torch-ringside[completion]'\n"
    )
