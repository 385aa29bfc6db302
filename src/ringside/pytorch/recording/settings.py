"""How patient a session is, and how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from ringside.monitor.hang import attribution as hang_judge
from ringside.monitor.links import sampler as links


@dataclass(frozen=True)
class RecordingSettings:
    """What a session does by default suits real jobs; small ones of seconds may want other figures.

    Args:
        hello_s: How long rank 0 waits for all ranks to say where they run.
        goodbye_s: How long it waits at the end for what they still send.
        heard_s: How often it is asked whether rank 0 still takes records in.
        silent_s: A store that has not answered for so long is said not to.
        records_kept: Records that wait for the store at most; then the oldest go.
        hang_s: Least wait that is called a hang.
        links_s: How often the connections of this rank are looked at.
    """

    hello_s: float = 30.0
    goodbye_s: float = 5.0
    heard_s: float = 10.0
    silent_s: float = 10.0
    records_kept: int = 10_000
    hang_s: float = hang_judge.LIMIT_S
    links_s: float = links.PERIOD_S
