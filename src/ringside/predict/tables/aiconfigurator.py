"""The tables of NVIDIA's aiconfigurator: `nccl_perf.parquet`, in older packages `nccl_perf.txt`, a CSV.

A row is a collective on GPUs of one host or NVLink domain: `message_size` in *elements* of `nccl_dtype`, `latency` in
ms. Rows of one size are repeats: their median is taken, between the shortest and the longest. Where rows name their
version of NCCL, it is believed before the folder's: aiconfigurator-core 0.12.0 has 2.29.2 in folders of older ones.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ringside.errors import UsageError
from ringside.predict.tables.table import Flag, Table, TableRow, collective_named

DTYPE_BYTES = {"int8": 1, "uint8": 1, "fp8": 1, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
PACKAGES = {"aiconfigurator_core": "aiconfigurator-core", "aiconfigurator": "aiconfigurator"}  # as pip calls them
GPUS_PER_HOST = 8  # at most, of the servers in it


def matches(text: str) -> bool:
    """Whether a text is a CSV of it."""
    first = text.lstrip().partition("\n")[0]
    return all(name in first for name in ("nccl_dtype", "message_size", "latency"))


def read(text: str, path: Path) -> list[Table]:
    """Return the tables of a text: one for every collective, element type, count of GPUs and version.

    Raises:
        UsageError: It is no CSV.
    """
    try:
        return _tables(csv.DictReader(io.StringIO(text)), path)
    except csv.Error as error:
        raise UsageError(f"{path}: no CSV ({error})") from None


def read_parquet(path: Path) -> list[Table]:
    """Return the tables of a Parquet file.

    Raises:
        UsageError: There is no pyarrow, or it is no such file.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UsageError(f"{path}: reading Parquet needs pyarrow: pip install 'torch-ringside[presets]'") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UsageError(f"{path}: no Parquet file ({' '.join(str(error).split())[:200]})") from None
    if not rows or not {"nccl_dtype", "message_size", "latency"} <= set(rows[0]):
        raise UsageError(f"{path}: no table of aiconfigurator; its columns are nccl_dtype, message_size, latency, ...")
    return _tables(rows, path)


def _tables(records: Iterable[Mapping[str, object]], path: Path) -> list[Table]:
    system = path.parts[path.parts.index("data") + 1] if "data" in path.parts[:-2] else path.stem
    groups: dict[tuple[str, str, int, str, str], dict[int, list[tuple[int, float]]]] = {}
    flags: dict[tuple[str, str, int, str, str], list[Flag]] = {}
    key = "", "", 0, "", ""
    for line, record in enumerate(records, 2):
        words = {name: str(value) for name, value in record.items() if value is not None}
        version = words.get("version") or path.parent.name
        try:
            gpus = words.get("num_gpus", "0")
            key = (
                collective_named(words.get("op_name", "")) or words.get("op_name", ""), words["nccl_dtype"],
                int(gpus) if gpus.isdecimal() else 0, version, words.get("device") or system.replace("_", " "),
            )  # fmt: skip
            sizes = groups.setdefault(key, {})
            size = int(float(words["message_size"])) * DTYPE_BYTES[words["nccl_dtype"]]
            sizes.setdefault(size, []).append((line, float(words["latency"]) * 1e-3))
        except (KeyError, ValueError, OverflowError):  # where it does not say of which table it is: of that before it
            told = f"no size, element type or latency: {[value[:40] for value in words.values()]}"
            groups.setdefault(key, {})
            flags.setdefault(key, []).append(Flag(line, told))
    found = []
    for named, sizes in groups.items():
        collective, dtype, ranks, version, device = named
        rows = []
        for size, repeats in sorted(sizes.items()):
            times = [time for _, time in repeats]
            ends = (min(times), max(times)) if len(times) > 1 else (None, None)
            rows.append(TableRow(repeats[0][0], float(size), median(times), None, None, *ends))
        name = f"{system} {collective} {dtype}, {ranks} GPUs, NCCL {version}"
        hosts = 1 if ranks <= GPUS_PER_HOST else 0
        words_of = (device, collective, "auto", str(path), f"NCCL {version}", dtype)
        found.append(Table(name, tuple(rows), tuple(flags.get(named, ())), ranks, hosts, *words_of))
    return found


# ------------------------------------------------------------------------------------------------ where it is installed


@dataclass(frozen=True)
class Package:
    """An installed package with tables.

    Args:
        name: As pip calls it.
        version: Its own.
        systems: Folder with a folder for every system.
    """

    name: str
    version: str
    systems: Path

    @property
    def measured(self) -> list[str]:
        """Names of the systems that have such files."""
        return [folder.name for folder in sorted(self.systems.iterdir()) if self.files(folder.name)]

    def files(self, system: str) -> list[Path]:
        """Return the files with NCCL's collectives of a system."""
        return sorted(
            path for path in (self.systems / system).rglob("nccl_perf.*") if path.suffix in (".parquet", ".txt")
        )


def installed() -> list[Package]:
    """Return the packages that lie in Python's path, without importing them: they bring much that is not needed."""
    found = []
    for module, name in PACKAGES.items():
        spec = importlib.util.find_spec(module)
        for place in spec.submodule_search_locations or () if spec else ():
            folder = Path(place)
            if (folder / "systems" / "data").is_dir():
                info = next(folder.parent.glob(f"{module}-*.dist-info"), None)
                version = re.sub(rf"^{module}-|\.dist-info$", "", info.name) if info else "of unknown version"
                found.append(Package(name, version, folder / "systems" / "data"))
    return found
