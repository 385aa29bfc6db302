"""Tables of measured collectives, in all the forms in which they are published.

aiconfigurator  The tables of NVIDIA's aiconfigurator, Parquet or text, and where it is installed
checks      Row checks: which rows of a table are used, and in words why the others are not
csv         CSV of measurements: columns by any usual name, in any order and unit
nccl_tests  Raw logs of nccl-tests and rccl-tests, whatever a launcher wrote before each line, and its JSON (`-J FILE`)
osu         The output of the OSU micro-benchmarks: `osu_allreduce`, and `osu_latency` and `osu_bw` between two ranks
table       A table of measured collectives: one value for all the forms in which they are published
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ringside.errors import UsageError
from ringside.predict.tables import aiconfigurator, csv, nccl_tests, osu
from ringside.predict.tables.table import Table
from ringside.text import size

_JOB = re.compile(r"\bn-0*(\d{1,8})-N-0*(\d{1,8})\b")  # ranks and hosts of a job's name, as CSCS Alps' sweeps have it
MOST_BYTES = 256 << 20  # of one file; a table of 10,000 rows has 2 MB


def read_tables(path: Path | str) -> list[Table]:
    """Return the tables of a file.

    Raises:
        UsageError: It cannot be opened, is no table of a known form, or is too large.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {size(MOST_BYTES, binary=True)}; a table of measurements is smaller")
        if path.suffix == ".parquet":
            return aiconfigurator.read_parquet(path)
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if "\0" in text:
        raise UsageError(f"{path} is not a text file; give a CSV, a log of nccl-tests, its JSON or OSU's output")
    if aiconfigurator.matches(text):
        return aiconfigurator.read(text, path)
    # CSV is what no other reader knows its own mark in.
    reader = next((reader for reader in (nccl_tests, osu) if reader.matches(text)), csv)
    tables = [replace(table, path=str(path)) for table in reader.read(text, path.stem)]
    if job := _JOB.search(path.stem):
        ranks, hosts = map(int, job.groups())
        tables = [replace(table, ranks=table.ranks or ranks, hosts=table.hosts or hosts) for table in tables]
    return tables
