"""Tables of measured collectives, in all the forms in which they are published.

`read_tables` recognises a file by its content: a log of nccl-tests (`nccl_tests`), its JSON (`json`), the output of
the OSU micro-benchmarks (`osu`), else CSV (`csv`). Nothing is judged there but what cannot be read at all; `checks`
does. What all of them return is in `table`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ringside.errors import UsageError
from ringside.predict.tables import csv, json, nccl_tests, osu
from ringside.predict.tables.table import Table

MOST_BYTES = 256 << 20  # of one file; a table of 10,000 rows has 2 MB


def read_tables(path: Path | str) -> list[Table]:
    """Return the tables of a file.

    Raises:
        UsageError: It cannot be opened, is no table of a known form, or is too large.
    """
    path = Path(path)
    text = _text(path)
    for reader in (json, nccl_tests, osu):
        if reader.recognises(text):
            return [replace(table, path=str(path)) for table in reader.read(text, path.stem)]
    return [replace(table, path=str(path)) for table in csv.read(text, path.stem)]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES >> 20} MiB; a table of measurements is smaller")
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if "\0" in text:
        raise UsageError(f"{path} is not a text file; give a CSV, a log of nccl-tests, its JSON or OSU's output")
    return text
