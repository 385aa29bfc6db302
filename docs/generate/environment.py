"""docs/environment.md: every environment variable of Ringside, what it means, and what holds without it.

`python -m docs.generate.environment > docs/environment.md` writes it; a test fails when it is stale. A module reads its
variable where it needs it: another test compares this table with the variables that the sources name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Variable(NamedTuple):
    """One environment variable.

    Args:
        name: Its name.
        meaning: What its values mean.
        default: What holds where it is not set; "": nothing special.
    """

    name: str
    meaning: str
    default: str = ""


FOR_USERS = (
    Variable("RINGSIDE", "`off`: nothing is attached, recorded or synchronised by Ringside"),
    Variable("RINGSIDE_ENGINE", "`auto`, `ringside` (an error where it cannot be) or `native` (only watch)", "`auto`"),
    Variable("RINGSIDE_RUN_DIR", "where rank 0 writes the run", "`runs/` and a time"),
    Variable("RINGSIDE_PRICE", "what an hour of one rank costs, in your currency: costs are told in money too"),
    Variable("RINGSIDE_WATCH", "`off`: no hang watch"),
    Variable("RINGSIDE_DIGEST_EVERY", "steps between two comparisons of parameters; 0: never", "100"),
    Variable("RINGSIDE_ON_VERDICT", "hooks, one a line"),
    Variable("RINGSIDE_METRICS_PORT", "`PORT` or `ADDRESS:PORT`"),
    Variable("RINGSIDE_METRICS_TOKEN", "what readers of metrics must send"),
    Variable("RINGSIDE_SERVE_TOKEN", "what readers of the page must send, and what `top` sends to one"),
    Variable("RINGSIDE_ALGORITHM", "one algorithm for all calls between hosts, such as `ring` or `hosts/ring`"),
    Variable(
        "RINGSIDE_WIRE_DTYPE",
        "`bfloat16`, `float16`, `int8` or `fp8_e4m3`: how float32 travels between hosts",
        "`float32`",
    ),
    Variable("RINGSIDE_ERROR_FEEDBACK", "`0`: what `int8` and `fp8_e4m3` round away of gradients is lost", "`1`"),
    Variable("RINGSIDE_REPRODUCIBLE", "`1`: the same bits whatever the algorithm"),
    Variable("RINGSIDE_SELECTION", "`measured`, `off`, `fresh` (time the links anew), or a table's path", "`measured`"),
    Variable("RINGSIDE_CACHE_DIR", "where those tables are kept", "`ringside` in the user's cache directory"),
    Variable(
        "RINGSIDE_TIMEOUT_S",
        "longest wait for other ranks in one collective, seconds; a timeout that the script gives its process group "
        "(`init_process_group(timeout=...)`, `new_group(timeout=...)`) or communicator counts before it",
        "1800",
    ),
    Variable("RINGSIDE_AS_GLOO", "`1`: serves the process groups that a program makes by the name `gloo`", "`0`"),
    Variable("RINGSIDE_NCCL_DIR", "where NCCL's [plugin](nccl.md) of Ringside makes its rings", "`/dev/shm`"),
    Variable("RINGSIDE_NCCL_STEPS", "`1`: that plugin records every step of proxies, not a second of 30"),
    Variable("RINGSIDE_ISA", "`baseline`, `avx2` or `avx512`: no better kernels than these", "the best there are"),
    Variable("RINGSIDE_MACHINE", "equal values mean: these ranks can share memory", "the machine's own id"),
    Variable("RINGSIDE_HOST", "what a rank calls its host", "the host's name"),
    Variable("RINGSIDE_NO_NATIVE", "do without the native core: building it, and using it"),
    Variable("RINGSIDE_SURVIVE_TRAP", "ends or stops a rank at a phase of surviving; for tests of that"),
)
"""Those that a user may set. Explicit arguments beat them, and they beat defaults."""

FOR_LAUNCHERS = (
    Variable("RINGSIDE_SURVIVE_START", "which start of a worker this is"),
    Variable("RINGSIDE_SURVIVE_KEPT", "where a final state lies that no process holds any more"),
    Variable("RINGSIDE_LAUNCHED", "`ringside run` started this process"),
    Variable("RINGSIDE_AUTOLOAD", "attach to the models that this process makes"),
    Variable("RINGSIDE_RANK_PID", "which process the rank's exit status is of"),
)
"""Those that Ringside's launchers set for their ranks."""

_HEAD = """# Environment variables

Made by `python -m docs.generate.environment`. Explicit arguments beat
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
