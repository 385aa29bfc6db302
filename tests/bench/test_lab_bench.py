"""What bench/lab/ reads off schedules, and its verdicts; no lab is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.common import median_interval
from bench.lab.expected import (
    SEGMENT_BYTES,
    busiest,
    chain,
    host_bytes,
    last_bucket_s,
    leaves,
    merged,
    overlap,
    played_bytes,
    schedule_of,
)
from bench.lab.jobs import Case, Turn, Turns
from bench.lab.long_links import law_s
from bench.lab.ordered_play import fair, shared_bytes
from bench.lab.report import Floor, Section, filled, size_words, verdict
from bench.lab.tuner import floors_of, row_of, starts_of

from ringside.schedule import ALGORITHMS

SIZE = 1 << 24


@pytest.mark.parametrize("n", range(2, 9))
def test_the_busiest_link_has_the_bytes_of_the_textbooks(n: int):
    units = {"parameter_server": n - 1, "ring": 2 * (n - 1) / n, "direct": 2 * (n - 1) / n, "in_network": 1}
    for name, tensors in units.items():
        assert busiest(schedule_of(name, n), SIZE).size_bytes == pytest.approx(tensors * SIZE)


def test_a_law_of_long_links_is_bytes_and_rounds():
    assert law_s("ring", 4, SIZE, 1e8, 0.02) == pytest.approx(1.5 * SIZE / 1e8 + 6 * 0.02)
    assert law_s("direct", 4, SIZE, 1e8, 0.02) == pytest.approx(1.5 * SIZE / 1e8 + 2 * 0.02)
    assert law_s("recursive_doubling", 2, SIZE, 1e8, 0.02) == pytest.approx(SIZE / 1e8 + 0.02)


def test_a_ring_has_no_pipeline_to_fill():
    assert busiest(schedule_of("ring", 8), SIZE).fill_hops == 0


def test_a_parameter_server_hands_its_last_segment_down_after_it_came():
    link = busiest(schedule_of("parameter_server", 5), SIZE)
    assert (link.vertex, link.fill_hops, link.fill_bytes) == (0, 1, SEGMENT_BYTES)


def test_a_chain_fills_and_empties_over_all_of_its_ranks_but_those_at_the_busiest_link():
    for n in range(3, 9):
        link = busiest(schedule_of("chain*32", n), SIZE)
        assert link.size_bytes == 2 * SIZE
        assert 0 < link.fill_hops <= 2 * (n - 1) - 1


def test_the_two_tree_halves_what_the_tree_adds():
    for n in (4, 6, 8):
        gain = (
            busiest(schedule_of("tree*32", n), SIZE).size_bytes
            / busiest(schedule_of("two_tree*32", n), SIZE).size_bytes
        )
        assert gain == pytest.approx(1.5)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"in_network"}))
def test_no_schedule_is_played_in_less_than_its_busiest_link_has_to_carry(name: str):
    for n in (2, 3, 5, 8):
        schedule = schedule_of(name, n)
        assert played_bytes(schedule, SIZE) >= busiest(schedule, SIZE).size_bytes * (1 - 1e-9)


def test_a_ring_is_played_without_a_pause_and_a_pipelined_tree_with_what_fills_and_drains_it():
    assert played_bytes(schedule_of("ring", 8), SIZE) == pytest.approx(busiest(schedule_of("ring", 8), SIZE).size_bytes)
    for n in (4, 6, 8):
        link = busiest(schedule_of("two_tree*32", n), SIZE)
        assert link.total_bytes < played_bytes(schedule_of("two_tree*32", n), SIZE) < 1.15 * link.total_bytes


def test_flows_share_what_enters_and_leaves_a_vertex():
    assert fair([(0, 1)]) == {(0, 1): 1.0}
    assert fair([(0, 1), (1, 0)]) == {(0, 1): 1.0, (1, 0): 1.0}  # in and out do not meet
    assert fair([(0, 1), (2, 1)]) == {(0, 1): 0.5, (2, 1): 0.5}
    shares = fair([(0, 3), (1, 3), (2, 3), (2, 4)])
    assert shares == pytest.approx({(0, 3): 1 / 3, (1, 3): 1 / 3, (2, 3): 1 / 3, (2, 4): 2 / 3})


@pytest.mark.parametrize(
    "name", ["ring", "direct", "tree", "halving_doubling", "recursive_doubling", "parameter_server"]
)
def test_where_flows_share_links_no_schedule_takes_less_than_its_bytes_and_none_much_more(name: str):
    for n in (2, 4, 5, 7):
        link = busiest(schedule_of(name, n), SIZE)
        shared = shared_bytes(schedule_of(name, n), SIZE)
        assert shared >= link.size_bytes * (1 - 1e-9)
        assert shared < 1.2 * link.total_bytes


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_hosts_send_is_received_by_hosts_or_by_the_switch(name: str):
    pairs = host_bytes(name, SIZE, [1] * 6)
    received, sent = (sum(side) for side in zip(*pairs, strict=True))
    assert received == pytest.approx(sent)
    assert min(sent for _, sent in pairs) > 0


def test_over_hosts_a_link_carries_the_tensor_s_share_and_over_ranks_that_of_its_ranks():
    assert host_bytes("hosts/ring", SIZE, [2] * 4) == [(1.5 * SIZE, 1.5 * SIZE)] * 4
    assert host_bytes("leaders/ring", SIZE, [2] * 4) == [(1.5 * SIZE, 1.5 * SIZE)] * 4
    assert host_bytes("ring", SIZE, [2] * 4) == [(1.75 * SIZE, 1.75 * SIZE)] * 4
    assert host_bytes("gloo", SIZE, [2] * 4) == host_bytes("ring", SIZE, [2] * 4)


def test_the_chain_of_messages_is_the_rounds_at_powers_of_two_and_shorter_beside_them():
    for name in ("ring", "tree", "two_tree", "halving_doubling", "recursive_doubling", "parameter_server"):
        for n in (2, 4, 8):
            assert chain(schedule_of(name, n)) == schedule_of(name, n).rounds
    assert chain(schedule_of("recursive_doubling", 3)) == 2  # what rank 2 sends comes while 0 and 1 exchange


def test_the_tree_s_leaves_are_the_odd_ranks():
    assert leaves(8) == [1, 3, 5, 7]


def test_a_step_s_buckets_follow_each_other_on_the_link_and_wait_for_backward():
    assert last_bucket_s([300.0], 3.0, 100.0) == pytest.approx(3.0 + 3.0)  # all of it when backward is through
    assert last_bucket_s([100.0] * 2, 3.0, 1e9) == pytest.approx(3.0)  # hidden
    assert last_bucket_s([100.0] * 2, 3.0, 100.0) == pytest.approx(4.0)  # the first is through when the second comes
    assert last_bucket_s([100.0] * 2, 3.0, 10.0) == pytest.approx(2.0 + 20.0)  # the link is busy from the first one on


def test_intervals_are_merged_and_overlapped():
    assert merged([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]
    assert overlap([(0, 2), (3, 5)], [(1, 4)]) == 2


def _turn(name: str, round_number: int, spans: list[list[tuple[float, float]]], iterations: int) -> Turn:
    return Turn((2, 4, name), round_number, iterations, [{"spans": each} for each in spans])


def test_an_all_reduce_takes_from_the_last_start_to_the_last_end():
    assert _turn("ring", 0, [[(0.0, 4.0)], [(1.0, 5.0)]], 2).seconds == 2.0


def test_calls_at_agreed_times_count_by_their_median():
    spans = [[(0.0, 1.0), (10.0, 12.0), (20.0, 29.0)]] * 2
    assert _turn("ring", 0, spans, 3).seconds == 2.0


def test_a_ratio_is_the_median_of_neighbours():
    turns = [_turn(name, k, [[(0.0, took)]], 1) for k in range(3) for name, took in (("a", k + 2.0), ("b", k + 1.0))]
    assert Turns(turns).ratio(2, 4, "a", "b") == 1.5


def test_the_median_s_interval_leaves_out_what_chance_puts_on_one_side_of_it():
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)  # no interval of so few holds it so often
    assert median_interval(list(range(9))) == (1, 7)  # 20 of 512 nines have fewer than two on one side
    assert median_interval(list(range(10))) == (1, 8)  # of ten the second and the ninth: 97.9%
    assert median_interval(list(range(15))) == (3, 11)


def test_a_choice_slower_than_stock_gloo_by_more_than_5_percent_is_a_miss_and_so_is_a_slow_start():
    took = {"gloo": [1.0] * 7, "default": [1.02] * 3 + [1.04] + [1.3] * 3, "ring": [1.04] * 7}
    turns = [_turn(name, k, [[(0.0, each)]], 1) for name, all_of in took.items() for k, each in enumerate(all_of)]
    for turn in turns:
        turn.reports[0]["chosen"] = "hosts/ring"
    row = row_of(Turns(turns), Case(2, 4, ["gloo", "default", "ring"]))
    assert (row["ratio"], row["interval"], row["chosen"]) == (1.04, "1.020-1.300", "hosts/ring")
    assert row["named"] == "ring 1.000 (0.981-1.250)"
    starts = starts_of([[(0.4, 1.0), (0.9, 1.1)], [(0.5, 0.9), (0.8, 1.2)]])
    assert starts == [(0.5, 1.0), (0.9, 1.2)]
    section = Section("selection", "", rows=[row, row | {"ratio": 1.06}])
    assert [floor.met for floor in floors_of(section, starts)] == [True, True, False]
    assert not next(floors_of(section, [(1.1, 2.0)])).met


def test_a_floor_that_was_not_measured_is_missed():
    floors = [Floor("one", 1.0, 0.9, 1.1), Floor("two", 1.2, 0.9, 1.1), Floor("three", None, 0.9)]
    said = verdict([Section("x", "x", floors=floors)]).splitlines()
    assert said[0] == "1 of 3 floors met"
    assert [line[:6] for line in said[1:]] == ["missed", "missed"]
    assert "not measured" in said[2]


def test_tables_line_up_and_say_where_there_is_nothing():
    section = Section("x", "Title", [("n", "n", "d"), ("ms", "ms", ".1f")], [{"n": 2, "ms": 12.34}, {"n": 10}])
    assert section.text().splitlines() == ["Title", "  n     ms", "  2   12.3", "  10     -"]


def test_sizes_in_words():
    assert [size_words(size) for size in (4, 1024, 65536, 1 << 24)] == ["4 B", "1 KB", "64 KB", "16 MB"]


def test_a_page_is_filled_where_it_has_a_mark_and_again():
    section = Section("x", "Title", [("n", "n", "d")], [{"n": 2}], notes=["so it is"])
    page = "before\n<!-- lab: x -->\nold\n<!-- end -->\nafter\n"
    once = filled(page, [section])
    assert "old" not in once
    assert "Title.\n\n| n |\n| --- |\n| 2 |\n" in once
    assert "- so it is" in once
    assert once.startswith("before\n")
    assert once.endswith("<!-- end -->\nafter\n")
    assert filled(once, [section]) == once
    assert filled("no mark", [section]) == "no mark"


def test_a_document_s_table_may_have_a_column_per_value():
    rows = [{"a": name, "n": n, "r": n / 2} for name in ("ring", "tree") for n in (2, 3)]
    section = Section("x", "Title", rows=rows, pivot=("a", "n", "r", ".1f"))
    assert (
        "| a | n = 2 | n = 3 |\n| --- | --- | --- |\n| ring | 1.0 | 1.5 |\n| tree | 1.0 | 1.5 |" in section.markdown()
    )


def test_the_page_has_a_place_for_every_section():
    page = (Path(__file__).parents[2] / "docs" / "between-hosts-measured.md").read_text()
    for name in ("bytes", "star", "selection", "selection-alone", "laws", "two-tree", "delay", "ddp", "ddp-slower"):
        assert page.count(f"<!-- lab: {name} -->") == 1
