"""`ringside what-if` as people call it: from hardware, from a recorded run; words, JSON and the page."""

import json

import pytest
from tests.recorded_runs import slow_run

from ringside.commands import main
from ringside.commands.options import link_of
from ringside.errors import UsageError
from ringside.monitor.run.directory import RunWriter
from ringside.monitor.run.records import RunInfo, StepRecord, Wire

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


OWN_S, BUCKET_S, MB_PER_S = (0.1, 0.104, 0.098), 0.15, 11.9
"""As a job of three hosts on 100 Mbit/s recorded itself: 3.5 MB of gradients in three buckets by `hosts/ring`."""


def run_of_hosts(path, *, ran="hosts/ring", wire_dtype="float32", busy=True, rate=MB_PER_S, ranks=3, steps=40):
    """Write the run of a job whose buckets follow each other over links of that rate: 13.3 MB/s would be all."""
    hosts = [f"host{rank}" for rank in range(ranks)]
    info = RunInfo(schema=1, name=path.name, started_unix=1.7e9, world_size=ranks, hosts=hosts, engine="ringside")
    writer = RunWriter(path, info)
    if ran:
        writer.event({"unix": 1.7e9, "kind": "carried", "algorithm": ran, "wire_dtype": wire_dtype})
    slowest = max(OWN_S[:ranks])
    step_s = slowest / 3 + slowest * 2 / 9 + 3 * BUCKET_S  # the first bucket is there after a third of backward
    for step in range(steps):
        for rank, own in enumerate(OWN_S[:ranks]):
            wire = Wire(seconds=1.0, sent_bytes=round(rate * 1e6), wire_seconds=1.0, peer=(rank + 1) % ranks)
            writer.append([StepRecord(
                step=step, rank=rank, ended_unix=1.7e9 + step, step_seconds=step_s, own_seconds=own,
                exposed_seconds=step_s - own, forward_seconds=own / 3, backward_seconds=own * 2 / 3,
                payload_bytes=3_500_000, collectives=3, busy_seconds=3 * BUCKET_S * busy,
                wires=(wire,) if rate else (),
            )])  # fmt: skip
    return path


STEP_S = 104e-3 / 3 + 104e-3 * 2 / 9 + 3 * BUCKET_S
WIRE_S = 3.5e6 / 3 * 4 / 3 / (MB_PER_S * 1e6)  # of a bucket, by the recorded rate
ROUNDS_S = BUCKET_S - WIRE_S


@pytest.mark.parametrize(
    ("words", "grows"),
    [
        # 12% of what is before the first bucket: the rest of backward hides what it delays
        (("--slow-rank", "1=12%"), 0.12 * (104e-3 / 3 + 104e-3 * 2 / 9)),
        (("--repair", "1"), (100e-3 - 104e-3) * 5 / 9),  # then rank 0 is the slowest
        (("--to-hosts", "6"), 3 * (0.25 * WIRE_S + 1.5 * ROUNDS_S)),  # 2(n-1)/n of the bytes, in 10 rounds where 4 were
        (("--link-rate", "2x"), -3 * WIRE_S / 2),
        (("--wire-dtype", "bfloat16"), -3 * WIRE_S / 2),
        (("--wire-dtype", "int8"), -3 * WIRE_S * (1 - (1 + 4 / 256) / 4)),
        (("--bucket", "4MB"), 104e-3 * 4 / 9 - 2 * ROUNDS_S),  # one bucket: nothing begins before backward ends
        (("--to-algorithm", "one_shot"), 3 * (0.5 * WIRE_S - 0.75 * ROUNDS_S)),  # the whole to two others, in one round
    ],
)
def test_six_questions_to_a_run_of_hosts_need_nothing_but_the_run(words, grows, tmp_path, capsys):
    run = run_of_hosts(tmp_path / "run")
    data = json.loads(said(capsys, str(run), *words, "--json").out)
    before, after, delta = data["step_seconds"]["before"], data["step_seconds"]["after"], data["delta_seconds"]
    assert before["value"] == pytest.approx(STEP_S)
    assert after["value"] - before["value"] == pytest.approx(delta["value"])
    assert delta["value"] == pytest.approx(grows, rel=0.06, abs=1e-3)
    assert delta["low"] <= grows + 1e-9
    assert grows - 1e-9 <= delta["high"]
    assert not any("algorithm" in line for line in data["unseen"])
    text = said(capsys, str(run), *words).out
    assert max(map(len, text.splitlines())) <= 80


def test_what_a_run_did_not_show_is_named(tmp_path, capsys):
    untold = run_of_hosts(tmp_path / "untold", ran="", busy=False)
    data = json.loads(said(capsys, str(untold), "--link-rate", "2", "--json").out)
    assert data["delta_seconds"]["value"] == pytest.approx(-3 * WIRE_S / 2, rel=0.06)
    bucket, went_by = data["unseen"]
    assert bucket == "what a bucket takes: it follows from what was left exposed"
    assert went_by == "by which algorithm gradients went: priced as ring (--algorithm NAME: as another)"
    known = said(capsys, str(untold), "--link-rate", "2", "--algorithm", "direct").out
    assert "not seen: what a bucket takes" in known
    assert "by which algorithm" not in known
    odd = said(capsys, str(run_of_hosts(tmp_path / "odd", ran="hosts/other")), "--to-hosts", "4").out
    assert "what hosts/other takes: priced as ring" in " ".join(odd.split())
    assert "own times of the hosts added" in odd


def test_a_run_that_was_half_as_wide_on_the_wire_is_twice_as_wide_without(tmp_path, capsys):
    half = run_of_hosts(tmp_path / "half", wire_dtype="bfloat16", rate=MB_PER_S / 2)
    data = json.loads(said(capsys, str(half), "--wire-dtype", "float32", "--json").out)
    assert data["delta_seconds"]["value"] == pytest.approx(3 * WIRE_S, rel=0.06)
    assert json.loads(said(capsys, str(half), "--wire-dtype", "bfloat16", "--json").out)["delta_seconds"]["value"] == 0


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
        (("{run}", "--to-hosts", "4"), "(ringside probe -o); one host shows no link between hosts"),
        (("{run}", "--link-rate", "2x"), "missing the network of"),
        (("{run}", "--wire-dtype", "int8"), "missing the network of"),
        (("{run}", "--to-algorithm", "ring"), "missing the network of"),
        (("{hosts}", "--to-hosts", "-1"), "at least 1"),
        (("{hosts}", "--link-rate", "fast"), "--link-rate fast: how many times what it is now, such as 2x"),
        (("{hosts}", "--link-rate", "0"), "links cannot carry 0 times as much"),
        (("{hosts}", "--wire-dtype", "fp4"), "gradients cannot travel as 'fp4'; there are float32"),
        (("{hosts}", "--to-algorithm", "magic"), "there is no 'magic'"),
        (("{hosts}", "--bucket", "0"), "--bucket"),
        (("{unlinked}", "--link-rate", "2x"), "(ringside probe -o); it recorded no link's rate"),
        (("{alone}", "--slow-rank", "0=12%"), "has no step of several ranks"),
        (("{run}", "--bytes", "1GB", "--repair", "1"), "omit --bytes and the like"),
        (("{run}", "--preset", "p5", "--hosts", "2", "--repair", "1"), "has 4 ranks"),
        (("{run}/nothing", "--repair", "1"), "nothing"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, reason, tmp_path, capsys):
    runs = {
        "{hosts}": run_of_hosts,
        "{unlinked}": lambda path: run_of_hosts(path, rate=0.0),
        "{alone}": lambda path: run_of_hosts(path, ranks=1),
        "{run}": lambda path: slow_run(path, steps=30),
    }
    for name, write in runs.items():
        if words[0].startswith(name):
            words = (words[0].replace(name, str(write(tmp_path / "run"))), *words[1:])
    error = said(capsys, *words, status=2).err
    assert reason in error
    assert error.count("\n") == 1
