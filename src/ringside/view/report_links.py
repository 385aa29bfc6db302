"""The links between hosts in a run's report: what each carried, how fast, and for how long."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from ringside.monitor.verdict import Verdict
from ringside.text import UNKNOWN, duration, share, size

MOST_ROWS = 32
COLUMNS = ("link", "hosts", "rate", "carried", "wire time", "of the run", "sent again")


def links_table(summary: dict[str, Any], verdicts: Iterable[Verdict]) -> str:
    """Return the table of a summary's links, slowest first; empty where no wire was watched.

    Args:
        summary: The content of `summary.json`.
        verdicts: Its verdicts: links that they name are marked.
    """
    links = summary.get("links") or []
    if not links:
        return ""
    slow = {tuple(verdict.ranks) for verdict in verdicts if verdict.kind == "slow_link"}
    hosts = {rank["rank"]: str(rank["host"]) for rank in summary["ranks"]}
    rows = "".join(_row(link, hosts, (link["src"], link["dst"]) in slow) for link in links[:MOST_ROWS])
    more = f" (the {MOST_ROWS} slowest of {len(links)})" if len(links) > MOST_ROWS else ""
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in COLUMNS)
    return f"""<section aria-label="Links"><figure class="wide">
<figcaption>Links between hosts, as the kernel counts{more}</figcaption>
<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></figure></section>"""


def _row(link: dict[str, Any], hosts: dict[int, str], culprit: bool) -> str:
    rate = UNKNOWN if link["bytes_per_s"] is None else f"{size(link['bytes_per_s'])}/s"
    cells = (
        rate,
        size(link["sent_bytes"]),
        duration(link["wire_seconds"]),
        share(link["wire_ratio"]).removeprefix("+"),
        size(link["retransmitted_bytes"]),
    )
    mark, badge = (' class="culprit"', ' <span class="badge">verdict</span>') if culprit else ("", "")
    places = " → ".join(hosts.get(link[end], "") for end in ("src", "dst"))
    return (
        f'<tr{mark}><th scope="row">{link["src"]} → {link["dst"]}{badge}</th>'
        f'<td class="text">{html.escape(places)}</td>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
    )
