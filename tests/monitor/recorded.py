"""Own times of real jobs, as recorded: `data/*.json.gz` hold seconds, [steps, ranks]."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> np.ndarray:
    return np.array(json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes())))
