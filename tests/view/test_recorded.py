from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest
from tests.recorded_runs import own_times, slow_run, write_run

import ringside
from ringside.errors import UsageError
from ringside.view.export.markdown import escape, render_markdown


def test_a_run_is_arrays_and_verdicts_and_its_directory_stays_as_it_is(tmp_path: Path) -> None:
    path = slow_run(tmp_path / "run")
    before = sorted((file.name, file.read_bytes()) for file in path.iterdir())
    run = ringside.Run(path)
    assert run.own_seconds.shape == run.wait_seconds.shape == (120, 4)
    assert run.step_seconds == pytest.approx(np.nanmax(run.own_seconds, axis=1) + 0.004)
    assert [(verdict.kind, verdict.ranks) for verdict in run.verdicts] == [("slow_rank", [2])]
    assert run["backward_seconds"].shape == (120, 4)
    assert [row["rank"] for row in run.rank_table()] == [0, 1, 2, 3]
    assert "Rank 2 is" in repr(run)
    assert sorted((file.name, file.read_bytes()) for file in path.iterdir()) == before


def test_a_field_that_records_do_not_have_is_refused_with_those_they_have(tmp_path: Path) -> None:
    run = ringside.Run(write_run(tmp_path / "run", own_times(20, 2)))
    with pytest.raises(UsageError, match="no field 'own'; they have step_seconds, own_seconds"):
        run["own"]


def test_the_notebook_shows_the_verdict_first_and_escapes_what_it_was_given(tmp_path: Path) -> None:
    page = ringside.Run(slow_run(tmp_path / "run"))._repr_html_()
    assert page.index("Rank 2 is") < page.index("<table>") < page.index("host-0")
    hostile = write_run(tmp_path / "x", own_times(20, 2))
    content = (hostile / "run.json").read_text()
    (hostile / "run.json").write_text(content.replace("host-0", "<script>alert(1)</script>"))
    assert "<script>" not in ringside.Run(hostile)._repr_html_()


def test_many_ranks_are_the_slowest_of_them(tmp_path: Path) -> None:
    run = ringside.Run(slow_run(tmp_path / "run", ranks=40, rank=33))
    page = run._repr_html_()
    assert "the slowest 16 of 40 ranks" in page
    assert page.count("<tr>") == 17


def test_without_pandas_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: object) -> object:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match="pip install pandas"):
        ringside.Run(write_run(tmp_path / "run", own_times(20, 2))).to_pandas()


def test_with_pandas_every_record_is_a_row(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = ringside.Run(write_run(tmp_path / "run", own_times(20, 2))).to_pandas()
    assert len(frame) == 40
    assert set(frame["rank"]) == {0, 1}


def test_markdown_says_the_verdict_first_and_cannot_be_broken_by_names(tmp_path: Path) -> None:
    run = ringside.Run(slow_run(tmp_path / "a|b<c>"))
    text = render_markdown(run.summary, run.info)
    lines = text.splitlines()
    assert lines[0] == "# a\\|b&lt;c&gt;"
    assert lines[2].startswith("## Rank 2 is")
    assert "| 2 | host-0 |" in text
    assert text.count("- ! **Ranks differ: rank ") == 1
    rows = [line for line in lines if line.startswith("|")]
    assert {row.count("|") - row.count("\\|") for row in rows} == {3, 6}


def test_text_for_markdown_is_escaped() -> None:
    assert escape("a_b*c`d\n[x]<y>&") == "a\\_b\\*c\\`d \\[x\\]&lt;y&gt;&amp;"
