"""`ringside demo --kill` from its command line to its last line: real keepers, a real SIGKILL, nothing lost.

Keepers and workers are forked; `tests/test_examples.py` starts some as a user does.
"""

import json
import shutil
from pathlib import Path

import pytest
from tests.support.schemas import departures

from ringside.text import name_ranks

from . import launched

pytest.importorskip("torch")


def test_a_rank_is_killed_comes_back_and_no_sample_is_lost(tmp_path):
    for index in range(4):
        shutil.copy(Path(__file__).parents[1] / "test_faults.py", tmp_path / f"{index}.py")
    words = ("--size", "tiny", "--nproc-per-node", "3", "--seed", "5", "--corpus", tmp_path, "--json")
    status, out, err = launched.run("demo", "--kill", *words, NO_COLOR="1")
    found = json.loads(out)
    assert status == 0, err
    assert (found["lost"], found["twice"], found["back"], len(found["digests"])) == (0, 0, True, 1)
    assert found["seconds"] > 0
    assert departures("demo-kill", found) == []
    victim = found["killed"]
    others = name_ranks(rank for rank in range(3) if rank != victim)
    story = [
        f"● rank {victim} is killed (SIGKILL) during step ",
        f" after the kill: {others} computed rank {victim}'s samples too",
        f"● rank {victim} has been started again and asks to join",
        f"● rank {victim} is back since step ",
        f"samples trained: {found['samples']}, lost: 0, steps counted twice: 0",
        "The state of all 3 ranks is the same to the bit",
    ]
    places = [err.find(line) for line in story]
    assert -1 not in places, err
    assert places == sorted(places)
