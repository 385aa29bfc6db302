"""Algorithms that have a closed form."""

from __future__ import annotations

from ringside.predict.simulation.closed_form import forms

WITH_FORMS = [*forms(), "ring_reduce_scatter", "ring_all_gather", "direct_reduce_scatter", "direct_all_gather"]
