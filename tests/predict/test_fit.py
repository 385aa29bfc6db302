"""Hardware held to its own tables: what is written is read again, and predictions are those that scores are made of."""

from dataclasses import replace

import numpy as np
import pytest

from ringside.errors import UsageError
from ringside.predict.fit import fit_tables, measured_topology
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.plan.options import AUTO, collective, option
from ringside.predict.score import errors_of, hold_out, measured, other_scale
from ringside.predict.tables import read_tables
from ringside.predict.tables.checks import check_rows
from ringside.predict.topology.files import from_toml, preset, presets, to_toml

from .shared_tables import published

KNOWN = Knowledge()


def table(name):
    (found,) = read_tables(published(f"{name}.csv"))
    return check_rows(found)


TWO, FOUR = table("issue309_aion_h100_2n16g"), table("issue309_aion_h100_4n32g")
SIZES = np.array([row.size_bytes for row in FOUR.rows])


def test_what_is_written_is_read_again():
    for name in presets():
        assert from_toml(to_toml(preset(name), "one\n\ntwo")) == preset(name), name
    fabric = measured_topology([TWO, FOUR], KNOWN)
    again = from_toml(to_toml(fabric))
    assert again == fabric
    assert again.sources == fabric.sources
    assert [times.ranks_per_host for times in again.measured] == [(8, 8), (8,) * 4]
    assert "\nranks_per_host = 8\n" in to_toml(preset("dgx-a100", hosts=4))  # a list only where hosts differ
    slow = replace(preset("dgx-a100"), sources={}).with_slow_link(0, 9, 4)
    assert from_toml(to_toml(slow)) == slow


def test_a_scale_that_was_not_measured_is_predicted_as_the_score_of_that_scale_says():
    fabric = measured_topology([TWO], KNOWN)
    score = other_scale([TWO], FOUR, KNOWN)
    found = option(fabric.sized(4, 8), AUTO).predict(SIZES)
    assert found.times_s == pytest.approx(score.prediction.times_s, rel=1e-9)
    assert found.low_s == pytest.approx(score.prediction.low_s, rel=1e-9)
    moved, plain = (option(topology.sized(4, 8)).predict(SIZES).times_s for topology in (fabric, preset("dgx-h100")))
    assert np.abs(np.log(moved / plain)).max() > 0.02  # the rows of two hosts did move it


def test_a_scale_that_was_measured_is_met_within_its_noise():
    fabric = measured_topology([FOUR], KNOWN)
    found = option(fabric, AUTO)
    assert found.measured is not None
    errors = [
        errors_of(SIZES, each.predict(SIZES).times_s, measured(FOUR.rows)).mape
        for each in (found, option(replace(fabric, measured=()), AUTO))
    ]
    assert errors[0] < 0.05 < errors[1]
    assert option(fabric, found.name).measured is not None  # by its name, too
    assert option(fabric, "ring").measured is None


def test_beyond_own_tables_the_band_widens_with_every_doubling_and_says_where_they_end():
    eight = replace(measured_topology([FOUR], KNOWN), ranks_per_host=(8,) * 8)
    wide = replace(eight, measured=(replace(eight.measured[0], ranks_per_host=(8,) * 8),))
    assert option(eight).beyond == "published tables end at 4 hosts"
    assert option(wide).beyond == ""
    assert option(wide.sized(16)).beyond == "your tables end at 8 hosts"
    widths = [np.ptp(np.log(option(wide.sized(hosts)).predict([1e9]).bands[0].ends)) for hosts in (16, 32, 64)]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_an_all_gather_is_moved_by_its_own_table_and_else_by_that_of_an_all_reduce():
    fabric = measured_topology([FOUR], KNOWN)
    plain = option(replace(fabric, measured=())).law.mean - option(fabric).law.mean
    assert np.abs(plain).max() > 0.01
    laws = [collective(each, "all_gather") for each in (replace(fabric, measured=()), fabric)]
    assert np.abs(laws[0].law.mean - laws[1].law.mean).max() > 0.01
    slow = replace(
        fabric.measured[0], collective="all_gather", times_s=tuple(3 * t for t in fabric.measured[0].times_s)
    )
    own = collective(replace(fabric, measured=(*fabric.measured, slow)), "all_gather")
    assert own.measured is not None
    assert own.predict([1e9]).times_s > 2 * laws[1].predict([1e9]).times_s


def test_what_is_told_of_a_fit_are_its_scores():
    two, four = fit_tables([TWO, FOUR], KNOWN)
    assert two.held_out.errors == hold_out(TWO, KNOWN).errors
    assert two.other_scales.errors == other_scale([FOUR], TWO, KNOWN).errors
    for figure in (two.latency_s, two.algbw, four.latency_s, four.algbw):
        assert figure.low < figure.value < figure.high
    assert two.expected == pytest.approx((34.4e-6, 258e9), rel=0.01)  # of the preset, before anything was measured
    (alone,) = fit_tables([replace(TWO, rows=TWO.rows[:3])], KNOWN)
    assert alone.other_scales is None
    assert "3 usable rows" in alone.held_out.refused


@pytest.mark.parametrize(
    ("tables", "known", "told"),
    [
        ([replace(TWO, cluster="")], KNOWN, "give --preset NAME"),
        ([TWO], Knowledge("ethernet-10g"), "no hardware of a GPU library"),
        ([replace(TWO, rows=())], KNOWN, "no usable row"),
        ([TWO, replace(FOUR, cluster="4x DGX A100")], KNOWN, "fit each hardware on its own"),
    ],
)
def test_tables_that_cannot_be_fitted_are_refused(tables, known, told):
    with pytest.raises(UsageError, match=told):
        measured_topology(tables, known)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sizes_bytes = [8]\ntimes_s = [1e-5, 2e-5]", "as many of one as of the other, at least 1, not 1 and 2"),
        ("sizes_bytes = [8]\ntimes_s = [-1]", "numbers more than 0"),
        ("sizes_bytes = [8]\ntimes_s = 3", "measured 1.times_s: a list of numbers, not 3"),
        ("sizes_bytes = [8]", "measured 1.times_s: is missing"),
    ],
)
def test_measured_times_that_cannot_be_are_named(line, told):
    text = to_toml(preset("dgx-a100")) + f"\n[[measured]]\nranks_per_host = [8, 8]\nnics = 8\n{line}\n"
    with pytest.raises(UsageError, match=told):
        from_toml(text)
