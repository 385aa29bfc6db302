"""What `ringside` says without a command and with a wrong one, and the form that every `--help` has."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ringside.commands import GROUPS, VERBS, build_parser, main, parts_of


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of every command and of its parts."""
    for parser in parts_of(build_parser()).values():
        yield parser
        yield from parts_of(parser).values()


def helped(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_each_command_can_be_had_without_the_others() -> None:
    """`build_parser(verbs=("what-if",))` failed: it and a part of predict needed each other."""
    program = """
import importlib, sys
for verb in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("ringside.commands")]:
        del sys.modules[name]
    importlib.import_module("ringside.commands." + verb.replace("-", "_"))
"""
    subprocess.run([sys.executable, "-c", program, *VERBS], check=True, timeout=120)


def test_a_command_imports_no_other() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "ringside", "predict"]
    done = subprocess.run(words, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    commands = {name.split(".")[2] for name in imported if name.startswith("ringside.commands.")}
    assert commands == {"options", "predict"}


@pytest.mark.parametrize("words", [(), ("help",), ("--help",), ("-h",)])
def test_help_lists_the_commands_in_groups_with_an_example(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert helped(*words) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(?!options|example)([A-Z][a-z ]+):$", out, re.MULTILINE) == list(GROUPS)
    assert re.findall(r"^  ([a-z][\w-]+) +\w", out, re.MULTILINE) == list(VERBS)
    assert "\n  $ ringside run -n 2 train.py\n" in out
    assert max(map(len, out.splitlines())) <= 80


def test_help_of_a_command_is_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert helped("help", "draw") == 0
    text = capsys.readouterr().out
    assert helped("draw", "--help") == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("run", "lab")])
def test_an_unknown_option_is_answered_with_the_usage_of_its_command(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """But of `run` and `lab`: what follows there may be another program's."""
    required = {"report": ["run"], "compare": ["a", "b"], "doctor": ["x"], "draw": ["ring"]}
    assert helped(verb, *required.get(verb, ()), "--no-such-option") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: ringside {verb} ")
    assert err.endswith(f"ringside {verb}: error: unrecognized arguments: --no-such-option\n")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("reprot", "there is no command 'reprot' (did you mean report?);"),
        ("whatif", "(did you mean what-if?);"),
        ("butterfly", "there is no command 'butterfly'; `ringside help` lists them"),
    ],
)
def test_a_wrong_command_is_answered_with_the_one_that_is_near(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == main(["help", word]) == 2
    assert capsys.readouterr().err.count(meant) == 2


@pytest.mark.parametrize("parser", list(parsers()), ids=lambda parser: parser.prog)
def test_every_help_has_one_form(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text = parser.format_help()
    # what it does, the exit statuses, the examples, each once and in this order
    statuses = re.findall(r"^exit status: ", text, re.MULTILINE | re.IGNORECASE)
    assert (len(statuses), text.count("\nexamples:\n  $ ringside") + text.count("\nexamples:\n  $ torchrun")) == (1, 1)
    assert "2 usage error" in text
    assert text.lower().index("\nexit status: ") < text.index("\nexamples:\n")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("parser", list(parsers()), ids=lambda parser: parser.prog)
def test_every_default_is_said_in_one_form(parser: argparse.ArgumentParser) -> None:
    unsaid = [
        action.dest
        for action in parser._actions
        if action.option_strings and action.nargs != 0 and action.default not in (None, "", 0, [], argparse.SUPPRESS)
        if "(default: " not in str(action.help) and action.dest != "steps"  # of nothing: all
    ]
    assert unsaid == []


def test_a_number_of_ranks_has_one_spelling() -> None:
    spellings = {parser.prog.removeprefix("ringside "): set(parser._option_string_actions) for parser in parsers()}
    ranks = {verb: found & {"-n", "--ranks", "--nproc-per-node", "--nproc"} for verb, found in spellings.items()}
    processes, counted = {"-n", "--nproc-per-node"}, {"-n", "--ranks"}
    assert {verb: found for verb, found in ranks.items() if found} == {
        **dict.fromkeys(("demo", "bench", "probe"), processes),  # `run` takes its words apart by itself
        **dict.fromkeys(("draw", "verify", "predict fit", "predict score"), counted),
    }
