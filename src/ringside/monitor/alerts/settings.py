"""What the user requested: which hooks to notify of verdicts, and where to serve metrics."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ringside.errors import UsageError
from ringside.monitor.alerts.hooks import Hook, parse_hooks

ON_VERDICT, METRICS_PORT, METRICS_TOKEN = "RINGSIDE_ON_VERDICT", "RINGSIDE_METRICS_PORT", "RINGSIDE_METRICS_TOKEN"


class Endpoint(NamedTuple):
    """Where `/metrics` is served.

    Args:
        host: A numeric address of this host.
        port: 0 for any that is free.
        token: Requests must send it as `Authorization: Bearer ...`; empty: none need.
    """

    host: str
    port: int
    token: str = ""


@dataclass(frozen=True)
class AlertSettings:
    """What was requested.

    Args:
        hooks: What to notify of verdicts.
        endpoint: Where to serve metrics; None: nowhere.
    """

    hooks: tuple[Hook, ...] = ()
    endpoint: Endpoint | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> AlertSettings:
        """Return what RINGSIDE_ON_VERDICT, RINGSIDE_METRICS_PORT and RINGSIDE_METRICS_TOKEN request.

        Raises:
            UsageError: One of them cannot be.
        """
        hooks, port = environ.get(ON_VERDICT, ""), environ.get(METRICS_PORT, "")
        return cls(
            tuple(parse_hooks(hooks)) if hooks.strip() else (),
            parse_endpoint(port, environ.get(METRICS_TOKEN, "")) if port.strip() else None,
        )


def parse_endpoint(text: str, token: str = "") -> Endpoint:
    """Return where to serve: `9464` (this host alone can ask), `10.0.0.5:9464`, `0.0.0.0:9464`, `[::]:9464`.

    Raises:
        UsageError: It cannot be read, or others could ask and there is no token.
    """
    host, _, port = text.strip().rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]") or "127.0.0.1")
        number = int(port)
    except ValueError:
        raise UsageError(
            f"--metrics-port takes a port or ADDRESS:PORT with a numeric address, such as 9464 or 10.0.0.5:9464, "
            f"not {text!r}"
        ) from None
    if not 0 <= number <= 65535:
        raise UsageError(f"there is no port {number}: --metrics-port takes 0 (any that is free) to 65535")
    if not address.is_loopback and not token:
        raise UsageError(
            f"metrics at {address} could be read by others: set {METRICS_TOKEN} and have Prometheus send it "
            "(authorization: credentials), or give the port alone to serve this host only"
        )
    return Endpoint(str(address), number, token)


# -------------------------------------------------------------------------------------------------
# How often parameters are compared: as the script requests, or the environment.

DIGEST_EVERY = "RINGSIDE_DIGEST_EVERY"
EVERY = 100
"""Steps between two comparisons, where nothing else is requested."""


def digest_steps(requested: int | str | None) -> int:
    """Return how many steps are between two comparisons: as requested, else RINGSIDE_DIGEST_EVERY, else `EVERY`.

    Raises:
        UsageError: It is no number of steps.
    """
    value = os.environ.get(DIGEST_EVERY) or EVERY if requested is None else requested
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
