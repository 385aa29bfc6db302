"""Algorithms that have a closed form."""

from __future__ import annotations

from ringside.predict.simulation.closed_form import _FORMS
from ringside.schedule import ALGORITHMS

FORMS = [name for name in ALGORITHMS if name in _FORMS or name == "hierarchical"]
WITH_FORMS = [*FORMS, "ring_reduce_scatter", "ring_all_gather", "direct_reduce_scatter", "direct_all_gather"]
