"""How often parameters are compared: as the script says, or the environment."""

from __future__ import annotations

import os

from ringside.errors import UsageError

DIGEST_EVERY = "RINGSIDE_DIGEST_EVERY"
EVERY = 100
"""Steps between two comparisons, where nothing else is asked for."""


def digest_steps(asked: int | str | None) -> int:
    """Return how many steps are between two comparisons: as asked, else RINGSIDE_DIGEST_EVERY, else `EVERY`.

    Raises:
        UsageError: It is no number of steps.
    """
    value = os.environ.get(DIGEST_EVERY) or EVERY if asked is None else asked
    try:
        steps = -1 if isinstance(value, float) else int(value)
    except (TypeError, ValueError):
        steps = -1
    if steps < 0:
        raise UsageError(
            f"parameters cannot be compared every {value!r} steps: give a whole number of steps, or 0 for never "
            f"(digest_every, --digest-every or {DIGEST_EVERY})"
        )
    return steps
