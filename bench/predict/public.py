"""The predictor on two public collections of measurements, with all rows, beside what it must be better than.

(a) CSCS Alps GH200: 100 sweeps of nccl-tests' all-reduce, 10 configurations of 4 to 2,048 GPUs. It has no licence: it
    is scored here, and nothing but errors is kept.

        git clone https://github.com/boeschf/nccl-benchmark-on-alps-2025 alps

(b) NVIDIA aiconfigurator (Apache-2.0): NCCL's collectives on A100 to GB300, L40S and RTX PRO 6000.

        pip install --no-deps --target packages pyarrow aiconfigurator-core==0.12.0 aiconfigurator==0.4.0

    PYTHONPATH=packages python -m bench.predict.public --alps alps [--write]

What is missing is not scored. All rows but those with wrong sums count first, then those that the checks of
`ringside predict score` leave. Every table is held out in both halves, and its first and last row are not scored: half
of its neighbours is missing there. `--write` writes docs/predict-public.md; what it has from `MISSED` on is by hand and
stays.

Which tables may be looked at while the model is changed was fixed before the first change: TUNING_SYSTEMS of (b), every
second by name, and TUNING_GPUS of (a). The rest is scored by `--scoring`, at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from bench.common import ROOT, make_parser

from ringside.predict import score
from ringside.predict.laws.calibrate import Prediction, expect
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.score import hockney, interpolate, measured
from ringside.predict.tables import aiconfigurator, read_tables
from ringside.predict.tables.checks import check_rows
from ringside.predict.tables.table import ALL_REDUCE, Table, TableRow, bus_factor

PAGE = ROOT / "docs" / "predict-public.md"
TUNING_SYSTEMS = ("a100_sxm", "b300_sxm", "gb300", "h200_sxm", "rtx_pro_6000_server")
TUNING_GPUS = (8, 16, 32, 64)
ALPS = "Alps GH200, 4x200G Slingshot"  # a host has four GPUs, each with an interface of 200 Gbit/s
KNOWN = Knowledge()


# ------------------------------------------------------------------------------------------------ tables


def alps_tables(folder: Path) -> dict[str, dict[int, Table]]:
    """Return the sweeps by configuration and number of GPUs."""
    found: dict[str, dict[int, Table]] = defaultdict(dict)
    for path in sorted(folder.glob("results/*/job-n-*.csv")):
        (table,) = read_tables(path)
        found[path.parent.name][table.ranks] = replace(table, cluster=ALPS)
    return dict(found)


def medians(sweeps: Sequence[dict[int, Table]], name: str) -> list[Table]:
    """Return by number of GPUs the median of every size over sweeps, between the shortest and the longest."""
    found = []
    for ranks in sorted(sweeps[0]):
        times: dict[float, list[float]] = defaultdict(list)
        for sweep in sweeps:
            for row in sweep[ranks].rows:
                times[row.size_bytes].append(row.time_s)
        rows = [
            TableRow(line, size, float(np.median(every)), None, None, min(every), max(every))
            for line, (size, every) in enumerate(sorted(times.items()), 1)
        ]
        found.append(replace(sweeps[0][ranks], name=f"{name}, {ranks} GPUs", rows=tuple(rows), flags=()))
    return found


def settings(configurations: dict[str, dict[int, Table]]) -> dict[str, list[dict[int, Table]]]:
    """Return the configurations by setting: each was run with two versions of the network's plugin."""
    found: dict[str, list[dict[int, Table]]] = defaultdict(list)
    for name, sweeps in configurations.items():
        found[name.partition("nccl-tests_")[0].strip("_") or "as it comes"].append(sweeps)
    return dict(found)


@dataclass(frozen=True)
class Measured:
    """A table of aiconfigurator: where it lies, and the table."""

    package: str
    system: str
    table: Table


def aiconfigurator_tables() -> list[Measured]:
    """Return all tables of NCCL's own folders."""
    found = []
    for package in aiconfigurator.installed():
        for folder in sorted(package.systems.iterdir()):
            paths = [path for path in package.files(folder.name) if path.parent.parent.name == "nccl"]
            tables = [table for path in paths for table in read_tables(path)]
            found += [Measured(package.name, folder.name, table) for table in tables if table.rows]
    return found


# ------------------------------------------------------------------------------------------------ what is scored


@dataclass(frozen=True)
class Result:
    """One table predicted: errors are mean absolute ones, by whom."""

    tuning: bool
    errors: dict[str, float]
    inside: tuple[bool, ...] = ()
    widths: tuple[float, ...] = ()


def error(times: np.ndarray, true: np.ndarray) -> float:
    return float(np.mean(np.abs(times / true - 1.0)))


def result(tuning: bool, prediction: Prediction, true: np.ndarray, **beside: np.ndarray) -> Result:
    errors = {"ringside": error(prediction.times_s, true)} | {
        name: error(value, true) for name, value in beside.items()
    }
    width = np.sqrt(prediction.high_s / prediction.low_s) - 1.0
    return Result(tuning, errors, tuple(map(bool, prediction.covers(true))), tuple(map(float, width)))


def held_out(table: Table, tuning: bool, others: Sequence[Table] = ()) -> Result:
    """Return both halves of a table predicted from each other; the first and the last row are not scored."""
    times, true, lines, between, bands = [], [], [], [], []
    for first in (0, 1):
        fitted = table.rows[first::2]
        found = score.hold_out(table, KNOWN, others=others, first=first)
        if found.prediction is None:
            raise SystemExit(f"{table.name}: {found.refused}")
        keep = [i for i, row in enumerate(found.scored) if row not in (table.rows[0], table.rows[-1])]
        sizes = np.array([found.scored[i].size_bytes for i in keep])
        rows = np.array([row.size_bytes for row in fitted]), measured(fitted)
        times.append(found.prediction.times_s[keep])
        bands.append((found.prediction.low_s[keep], found.prediction.high_s[keep]))
        true.append(measured([found.scored[i] for i in keep]))
        lines.append(hockney(*rows, sizes))
        between.append(interpolate(*rows, sizes))
    low, high = (np.concatenate([band[i] for band in bands]) for i in (0, 1))
    middle = np.concatenate(times)
    whole = Prediction(middle, middle, low, high, middle < 0)
    return result(tuning, whole, np.concatenate(true), line=np.concatenate(lines), between=np.concatenate(between))


def scaled(fit: Sequence[Table], test: Table, tuning: bool) -> Result:
    """Return a scale predicted from others; the last of them carried over beside."""
    found = score.other_scale(fit, test, KNOWN)
    assert found.prediction is not None
    sizes = np.array([row.size_bytes for row in test.rows])
    near = np.array([row.size_bytes for row in fit[-1].rows]), measured(fit[-1].rows)
    beside = {"line": hockney(*near, sizes), "carried": interpolate(*near, sizes)}
    return result(tuning, found.prediction, measured(test.rows), **beside)


# ------------------------------------------------------------------------------------------------ the page

WHO = ("ringside", "line", "between", "carried")
HEADINGS = ("ringside", "90th", "in band", "band ±", "α–β line", "interpolation", "carried over")


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def scored_line(name: str, target: str, results: Sequence[Result]) -> str:
    """Return a row of the page: medians over tables."""
    of = {who: [found.errors[who] for found in results if who in found.errors] for who in WHO}
    middle = {who: float(np.median(every)) if every else None for who, every in of.items()}
    inside = [hit for found in results for hit in found.inside]
    widths = [width for found in results for width in found.widths]
    cells = [
        name, str(len(results)), target, f"**{percent(middle['ringside'])}**",
        percent(float(np.percentile(of["ringside"], 90)) if results else None),
        percent(float(np.mean(inside)) if inside else None), percent(float(np.median(widths)) if widths else None),
        percent(middle["line"]), percent(middle["between"]), percent(middle["carried"]),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def board(rows: Sequence[tuple[str, str, Sequence[Result]]], scoring: bool) -> Iterable[str]:
    """Yield a table of scores: tuning tables, and with `scoring` the others and all."""
    yield f"| what | tables | target | {' | '.join(HEADINGS)} |"
    yield "|---" * (3 + len(HEADINGS)) + "|"
    for name, target, results in rows:
        tuning = [found for found in results if found.tuning]
        rest = [found for found in results if not found.tuning]
        if tuning:
            yield scored_line(f"{name}: tuning", target, tuning)
        if scoring and rest:
            yield scored_line(f"{name}: scoring", target, rest)
        if scoring and rest and tuning:
            yield scored_line(f"{name}: all", target, results)


def alps_rows(folder: Path, prepare: Callable[[Table], Table]) -> Iterable[tuple[str, str, Sequence[Result]]]:
    """Yield the scores of (a)."""
    configurations = alps_tables(folder)
    tables = [prepare(table) for table in medians(list(configurations.values()), "medians")]
    tuned = {table.ranks: table.ranks in TUNING_GPUS for table in tables}
    yield "hold-out, the table alone", "≤ 9.5%", [held_out(table, tuned[table.ranks]) for table in tables]
    beside = []
    for table in tables:
        # while tuning, neither do the others come from the scoring half
        others = [other for other in tables if other is not table and (tuned[other.ranks] or not tuned[table.ranks])]
        beside.append(held_out(table, tuned[table.ranks], others))
    yield "hold-out, other scales given", "≤ 8%, tuning ≤ 9%", beside
    by_ranks = {table.ranks: table for table in tables}
    for times, target in ((2, "≤ 18%"), (4, "≤ 25%")):
        pairs = [(n, times * n) for n in by_ranks if n >= 8 and times * n in by_ranks]
        yield (
            f"n to {times}n",
            target,
            [scaled([by_ranks[n]], by_ranks[far], tuned[n] and tuned[far]) for n, far in pairs],
        )
        yield (
            f"up to n, to {times}n",
            "",
            [
                scaled([by_ranks[m] for m in by_ranks if 8 <= m <= n], by_ranks[far], tuned[n] and tuned[far])
                for n, far in pairs
            ],
        )
    yield "one host to two", "", [scaled([by_ranks[4]], by_ranks[8], False)]
    each = [prepare(table) for name, sweeps in settings(configurations).items() for table in medians(sweeps, name)]
    yield "hold-out, each setting's pair", "", [held_out(table, tuned[table.ranks]) for table in each]
    yield (
        "single sweeps",
        "",
        [
            held_out(prepare(table), tuned[table.ranks])
            for sweeps in configurations.values()
            for table in sweeps.values()
        ],
    )


def version_rows(tables: Sequence[Measured]) -> Iterable[tuple[str, str, Sequence[Result]]]:
    """Yield the scores across versions: of every two that follow each other, the newer from the older."""
    groups: dict[tuple[str, str], dict[tuple[tuple[int, ...], int], Table]] = defaultdict(dict)
    for one in tables:
        number = tuple(map(int, one.table.library.split()[-1].split(".")))
        groups[one.system.removesuffix("_sxm"), one.table.dtype].setdefault((number, one.table.ranks), one.table)
    found = []
    for (system, _), known in groups.items():
        tuning = any(system == name.removesuffix("_sxm") for name in TUNING_SYSTEMS)
        for new, ranks in known:
            older = [number for number, count in known if number < new and count == ranks]
            if not older:
                continue
            old, after = max(older), known[new, ranks]
            before = known[old, ranks]
            sizes = [row.size_bytes for row in before.rows]
            rows = [row for row in after.rows if row.size_bytes in sizes]
            if len(rows) >= 10:
                test = replace(after, rows=tuple(rows))
                found.append(scaled([before], test, tuning))
    yield "a version from the one before", "≤ carried", found
    far = [one for one in found if one.errors["carried"] > 0.05]
    yield "of which differ by more than 5%", "≤ 0.8 carried", far


OTHERS = ("all_gather", "reduce_scatter", "alltoall")


def other_collectives(tables: Sequence[Measured]) -> Iterable[tuple[str, str, Sequence[Result]]]:
    """Yield the scores of other collectives of halves without a row of their own: from nothing, and from all-reduce.

    *Carried over* is the all-reduce's time by the bytes that a ring moves of either.
    """
    reduces: dict[tuple[str, str, int], Table] = {}
    for one in tables:
        if one.table.collective == ALL_REDUCE and one.table.dtype == "half":
            reduces.setdefault((one.system, one.table.library, one.table.ranks), one.table)
    for name in OTHERS:
        alone, moved = [], []
        for one in tables:
            table, tuning = one.table, one.system in TUNING_SYSTEMS
            reduce = reduces.get((one.system, table.library, table.ranks))
            law = KNOWN.law(table)
            if table.collective != name or table.dtype != "half" or reduce is None or law is None:
                continue
            sizes, true = np.array([row.size_bytes for row in table.rows]), measured(table.rows)
            alone.append(result(tuning, expect(law).predict(sizes), true))
            rows = np.array([row.size_bytes for row in reduce.rows]), measured(reduce.rows)
            share = bus_factor(name, table.ranks) / bus_factor(ALL_REDUCE, table.ranks)
            beside = {"line": share * hockney(*rows, sizes), "carried": share * interpolate(*rows, sizes)}
            prediction = expect(score.moved_law([reduce], table, KNOWN)).predict(sizes)
            moved.append(result(tuning, prediction, true, **beside))
        yield f"{name} from nothing", "", alone
        yield f"{name} from all_reduce's table", "≤ carried", moved


def repeats(tables: Sequence[Measured]) -> float:
    """Return how far two tables of the same system, version, type and number of GPUs are apart: the median of pairs."""
    first: dict[tuple[str, ...], Table] = {}
    apart = []
    for one in tables:
        table = one.table
        key = (one.package, one.system, table.library, table.dtype, table.name)
        before = first.setdefault(key, table)
        if before is not table and [r.size_bytes for r in before.rows] == [r.size_bytes for r in table.rows]:
            apart.append(error(measured(before.rows), measured(table.rows)))
    return float(np.median(apart))


def redrawn(configurations: dict[str, dict[int, Table]], draws: int = 200) -> float:
    """Return how far a median moves that is drawn again from the configurations: the median over numbers of GPUs."""
    random, sweeps = np.random.default_rng(0), list(configurations.values())
    moves = []
    for table in medians(sweeps, "medians"):
        times: dict[float, list[float]] = defaultdict(list)
        for sweep in sweeps:
            for row in sweep[table.ranks].rows:
                times[row.size_bytes].append(row.time_s)
        drawn = {size: np.median(random.choice(every, (draws, len(every))), axis=1) for size, every in times.items()}
        moves.append(float(np.mean([np.abs(drawn[row.size_bytes] / row.time_s - 1) for row in table.rows])))
    return float(np.median(moves))


def scores(alps: Path | None, checked: bool, scoring: bool) -> Iterable[str]:
    """Yield the page's lines for all rows, or for those that pass the checks."""

    def prepare(table: Table) -> Table:
        possible = [row for row in table.rows if row.size_bytes > 0 and row.time_s > 0]
        return check_rows(table) if checked else replace(table, rows=tuple(possible))

    which = "without the rows that the checks flag" if checked else "all rows"
    if alps is not None:
        configurations = alps_tables(alps)
        wrong = sum(table.wrong_sums for sweeps in configurations.values() for table in sweeps.values())
        yield from [f"## CSCS Alps GH200, {which}", "", f"{wrong} rows returned wrong sums and are in no figure."]
        yield from [
            f"A median drawn again from the ten configurations moves by {percent(redrawn(configurations))}.",
            "",
        ]
        yield from board(list(alps_rows(alps, prepare)), scoring)
        yield ""
    prepared = [replace(one, table=prepare(one.table)) for one in aiconfigurator_tables()]
    tables = [one for one in prepared if one.table.rows]
    if not tables:
        return
    used = " and ".join(f"{package.name} {package.version}" for package in aiconfigurator.installed())
    yield from [f"## NVIDIA aiconfigurator, {which}", "", f"{used}. Two tables of the same hardware and version are"]
    yield from [f"{percent(repeats(tables))} apart.", ""]

    def held(name: str, package: str, collective: str, *dtypes: str, target: str = "") -> tuple[str, str, list[Result]]:
        chosen = [
            held_out(one.table, one.system in TUNING_SYSTEMS) for one in tables
            if one.package == package and one.table.dtype in dtypes and one.table.collective == collective
        ]  # fmt: skip
        return f"{name} {' and '.join(dtypes)}", target, chosen

    rows = [
        held("all_reduce", "aiconfigurator-core", ALL_REDUCE, "half", target="≤ 3.3%"),
        held("all_reduce", "aiconfigurator-core", ALL_REDUCE, "int8"),
        held("old all_reduce", "aiconfigurator", ALL_REDUCE, "half", "int8"),
        *version_rows([one for one in tables if one.table.collective == ALL_REDUCE]),
    ]
    yield from board(rows, scoring)
    yield from ["", f"### Other collectives{f', {which}' * checked}", ""]
    rows = [held(name, "aiconfigurator-core", name, "half", "int8") for name in OTHERS]
    yield from board([*rows, *other_collectives(tables)], scoring)
    yield ""


HEAD = """\
# Predictions against public collections

Written up to *Missed* by `python -m bench.predict.public --scoring --write`; its docstring says where the tables come
from. Nothing of them is kept here but errors. Mean absolute errors of the time by table, medians over tables, the 90th
percentile beside them. Hold-out: every second row predicted from the others, both halves, the first and the last row
not scored. *in band* is the share of rows in their 95% band, *band ±* its median half-width. The α–β line and the
interpolation in log-log are fitted to the same rows; *carried over* takes the nearest table as it is.

*Tuning* tables are those that were looked at while the model was made: 8 to 64 GPUs of Alps, every second system of
aiconfigurator by name. *Scoring* tables had no part in it.

*From nothing*: only the table's words. *From all_reduce's table*: that of the same system, version and number of GPUs,
no row of its own; *carried over* is the all-reduce's time by the bytes that a ring moves of either.
"""


MISSED = "## Missed\n"


def main() -> int:
    """Print or write the page."""
    parser = make_parser("bench.predict.public", __doc__)
    parser.add_argument("--alps", type=Path, help="folder of the Alps repository")
    parser.add_argument("--scoring", action="store_true", help="also the tables that nothing is tuned on")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    page = "\n".join([HEAD, *(line for checked in (False, True) for line in scores(args.alps, checked, args.scoring))])
    if args.write:
        _, mark, by_hand = PAGE.read_text().partition(MISSED)
        PAGE.write_text(f"{page}\n{mark}{by_hand}")
    print(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
