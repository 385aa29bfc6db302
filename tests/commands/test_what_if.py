"""`ringside what-if` as people call it: from hardware, from a recorded run; words, JSON and the page."""

import json

import pytest
from tests.recorded_runs import slow_run

from ringside.commands import main
from ringside.commands.options import link_of
from ringside.errors import UsageError

H100 = ("--preset", "dgx-h100", "--hosts", "4", "--bytes", "1GB", "--compute-seconds", "0.25")


def said(capsys, *words, status=0):
    assert main(["what-if", *words]) == status
    return capsys.readouterr()


def test_a_slow_rank_in_words(capsys):
    text = said(capsys, *H100, "--slow-rank", "3=12%", "--price", "2.5", "--watts", "700").out
    lines = text.splitlines()
    assert lines[0] == "what if rank 3 were 12.0% slower"
    assert lines[2] == "a step takes 30.0 ms longer (input), +12.0%"
    assert "own work 250 ms (input) → 280 ms (input)" in text
    assert "lost per day: 82.2 (input) of 768 rank-hours" in text
    assert "cost per day: 205 (input), 2.50 per rank-hour" in text
    assert "energy per day: 57.5 kWh (input), 700 W per rank" in text
    whole = " ".join(text.split())
    assert "critical path (played as hierarchical, exact for these figures): late rank 3 costs 30.0 ms" in whole
    assert max(map(len, lines)) <= 80


def test_several_changes_at_once_as_json(capsys):
    words = ("--lose-rail", "2", "--oversubscribe", "2", "--bucket", "50MB", "--to-algorithm", "ring", "--json")
    data = json.loads(said(capsys, *H100, *words, "--price", "2").out)
    assert data["schema"] == 1
    assert data["buckets"] == 20
    delta = data["delta_seconds"]
    assert delta["low"] <= delta["value"] <= delta["high"]
    assert data["money_per_day"]["value"] == pytest.approx(2 * data["rank_hours_per_day"]["value"])
    assert data["kwh_per_day"] is None
    assert data["critical_path"]["algorithm"] == "ring"
    before, after = (data["step_seconds"][when] for when in ("before", "after"))
    assert after["value"] - before["value"] == pytest.approx(delta["value"])
    assert before["low"] < before["value"] < before["high"]


def test_a_recorded_run_without_its_slow_rank(tmp_path, capsys):
    run = slow_run(tmp_path / "run", onset=0)
    page = tmp_path / "page.html"
    data = json.loads(said(capsys, str(run), "--repair", "2", "--json", "--html", str(page)).out)
    assert data["recorded"]
    assert data["extrapolated"] == []
    assert data["delta_seconds"]["value"] == pytest.approx(-0.03, rel=0.25)
    assert data["delta_seconds"]["high"] < 0
    text = page.read_text()
    assert "rank 2" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    worse = json.loads(said(capsys, str(run), "--slow-rank", "0=50%", "--json").out)
    assert worse["delta_seconds"]["low"] > 0
    slower = said(capsys, str(run), "--preset", "loopback", "--bucket", "1MB").out
    assert "extrapolated" in slower
    assert " less to " in slower.splitlines()[2]  # nobody has seen such buckets: the band has both signs


def test_a_recorded_runs_link_is_blamed_beside_its_late_rank(tmp_path, capsys):
    run = slow_run(tmp_path / "run", onset=0)
    words = ("--preset", "loopback", "--algorithm", "ring", "--slow-link", "0:1=90", "--json")
    data = json.loads(said(capsys, str(run), *words).out)
    blamed = [(one["kind"], one["ranks"]) for one in data["critical_path"]["blamed"]]
    assert ("slow link", [0, 1]) in blamed
    assert blamed[0] == (data["critical_path"]["guilty"]["kind"], data["critical_path"]["guilty"]["ranks"])
    assert data["exposed_seconds"]["after"]["low"] > data["exposed_seconds"]["before"]["high"]
    assert data["delta_seconds"]["low"] < data["delta_seconds"]["value"] < data["delta_seconds"]["high"]


def test_the_best_buckets_of_a_recorded_run(tmp_path, capsys):
    run = slow_run(tmp_path / "run")
    assert main(["predict", "--run", str(run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["question"]["size_bytes"] == 4e6
    assert data["question"]["compute_seconds"] == pytest.approx(0.115, rel=0.1)
    assert data["buckets"][0]["exposed"]["value"] <= data["buckets"][-1]["exposed"]["value"]
    took = {one["algorithm"]: one["seconds"] for one in data["here"]}[data["priced"]["algorithm"]]
    assert took == data["priced"]["seconds"] == data["scaling"][-1]["seconds"]  # one thing, one number
    assert main(["predict", "--run", str(run)]) == 0
    assert "  as it ran: 2 of 2 MB, exposed" in capsys.readouterr().out


def test_links_and_ranks_are_read_as_people_write_them():
    assert [link_of(text) for text in (" 7:8=4", "7>8=2.5x", "10:0=1")] == [(7, 8, 4.0), (7, 8, 2.5), (10, 0, 1.0)]
    for text in ("7:8=", "a:8=4", "7-8=4", "7:8=-4", "7:8=4xx"):
        with pytest.raises(UsageError, match=r"such as 7:8=4$"):
            link_of(text)


def test_gradients_are_in_buckets_of_25_mib_unless_it_is_said(capsys):
    def buckets(size, *words):
        return json.loads(said(capsys, *H100[:4], "--bytes", size, *words, "--sharp", "--json").out)["buckets"]

    mib = 2**20
    assert [buckets(str(n)) for n in (1, 25 * mib, 25 * mib + 1, 50 * mib, 10**9)] == [1, 1, 2, 2, 39]
    assert buckets("1GB", "--buckets", "1") == 1


def test_json_has_its_energy_and_no_critical_path_where_nothing_is_played(capsys):
    words = ("--preset", "dgx-h100", "--bytes", "1GB", "--compute-seconds", "0.25", "--slow-rank", "3=12%", "--json")
    data = json.loads(said(capsys, *words, "--hosts", "4", "--watts", "500").out)
    assert data["kwh_per_day"]["value"] == pytest.approx(0.5 * data["rank_hours_per_day"]["value"])
    assert (data["money_per_day"], data["hosts"], data["ranks"]) == (None, 4, 32)
    many = json.loads(said(capsys, *words, "--hosts", "2048").out)
    assert many["critical_path"] is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((*H100[:6], "--compute-seconds", "0", "--sharp"), "--compute-seconds 0: seconds of forward and backward"),
        ((*H100[:6], "--compute-seconds", "inf", "--sharp"), "--compute-seconds inf: seconds of forward and backward"),
        ((*H100, "--sharp", "--watts", "inf"), "--watts inf: 0 or more"),
        ((*H100, "--slow-rank", "3=12"), "such as 3=12%"),
        (("{run}", "--buckets", "2", "--repair", "1"), "omit --bytes and the like"),
        (("{run}", "--compute-seconds", "1", "--repair", "1"), "omit --bytes and the like"),
        ((*H100,), "nothing to change: add --slow-rank"),
        ((*H100, "--slow-rank", "3"), "such as 3=12%"),
        ((*H100, "--slow-rank", "99=5%"), "ranks are 0 to 31"),
        ((*H100, "--slow-link", "7-8"), "such as 7:8=4"),
        ((*H100, "--lose-rail", "9"), "hosts are 0 to 3"),
        ((*H100, "--sharp", "--price", "-1"), "--price -1: 0 or more"),
        ((*H100, "--sharp", "--buckets", "0"), "at least 1"),
        ((*H100[:-1], "0", "--sharp"), "more than 0"),
        (("--slow-rank", "3=12%"), "--preset NAME or --topology FILE"),
        (("--preset", "ethernet-10g", "--sharp"), "there is no 'in_network'"),
        ((*H100, "--sharp", "--algorithm", "magic"), "there is no 'magic'"),
        (("{run}", "--to-hosts", "4"), "missing the network of"),
        (("{run}", "--bytes", "1GB", "--repair", "1"), "omit --bytes and the like"),
        (("{run}", "--preset", "p5", "--hosts", "2", "--repair", "1"), "has 4 ranks"),
        (("{run}/nothing", "--repair", "1"), "nothing"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, reason, tmp_path, capsys):
    run = slow_run(tmp_path / "run", steps=30) if "{run}" in words[0] else tmp_path
    error = said(capsys, *(word.replace("{run}", str(run)) for word in words), status=2).err
    assert reason in error
    assert error.count("\n") == 1
