"""docs/environment.md, made from the table in `ringside.environment`.

`python -m docs.generate.environment > docs/environment.md` writes it; a test fails when it is stale.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringside.environment import FOR_LAUNCHERS, FOR_USERS, Variable

_HEAD = """# Environment variables

Made from `src/ringside/environment.py` by `python -m docs.generate.environment`. Explicit arguments beat
these, and these beat defaults.

"""
_LAUNCHERS = """
Ringside's launchers set these for their ranks; they are not for you:

"""
_OTHERS = """
Also read: torchrun's variables (`RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `PET_...`),
`GLOO_SOCKET_IFNAME`, `XDG_RUNTIME_DIR`, `XDG_CACHE_HOME`, `NO_COLOR`, `TERM`.
"""


def environment_page() -> str:
    """Return the text of docs/environment.md."""
    return _HEAD + table(FOR_USERS) + _LAUNCHERS + table(FOR_LAUNCHERS) + _OTHERS


def table(variables: Iterable[Variable]) -> str:
    """Return a Markdown table of variables."""
    rows = [f"| `{each.name}` | {each.meaning} | {each.default} |" for each in variables]
    return "\n".join(["| variable | means | default |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(environment_page(), end="")
