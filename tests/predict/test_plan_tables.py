"""What a plan says of a preset against what was published of such hardware: the claim behind `extrapolated`."""

import numpy as np
import pytest

from ringside.predict import preset
from ringside.predict.plan.options import option
from ringside.predict.score import check_tables, measured
from ringside.predict.tables import read_tables

from .shared_tables import published

TABLES = [
    ("dgxc_h100_1n8g", "dgx-h100", 1),
    ("aws_p4de_a100_2n16g", "p4de", 2),
    ("aws_p5_h100_2n16g", "p5", 2),
    ("issue309_aion_h100_4n32g", "dgx-h100", 4),
    ("mleng_a100_1n8g", "dgx-a100", 1),
]


@pytest.mark.parametrize(("name", "hardware", "hosts"), TABLES)
def test_published_rows_lie_in_the_band_of_a_plan_that_is_not_called_extrapolated(name, hardware, hosts):
    (table,), _ = check_tables(read_tables(published(f"{name}.csv")))
    sizes, times = np.array([row.size_bytes for row in table.rows]), measured(table.rows)
    told = option(preset(hardware, hosts)).predict(sizes)
    assert not told.extrapolated[sizes <= 17179869184].any()
    assert told.covers(times).mean() >= 0.9
    assert np.median(np.abs(told.times_s / times - 1)) < 0.3


def test_twelve_hosts_are_called_extrapolated_and_lie_in_the_wider_band():
    (table,), _ = check_tables(read_tables(published("coreweave_h100_sharp_12n96g.csv")))
    sizes, times = np.array([row.size_bytes for row in table.rows]), measured(table.rows)
    told, near = (option(preset("dgx-h100", hosts)).predict(sizes) for hosts in (12, 4))
    assert told.extrapolated.all()
    assert told.covers(times).all()
    assert np.all(told.high_s / told.low_s > near.high_s / near.low_s)
