"""Show a run as a live page: the straggler, since when, why, and at what cost.

Without RUN_DIR it shows the newest job that runs on this machine, else the
newest run under runs/. The page is read-only and listens on localhost; any
other --host needs a token. /runs lists all runs, and /metrics serves
Prometheus.

exit status: 0 after Ctrl-C, 2 usage error.

examples:
  $ ringside serve
  $ ringside serve runs/demo-1 --port 8080
  $ RINGSIDE_SERVE_TOKEN=... ringside serve --host 0.0.0.0
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from ringside.commands.options import add_verbosity, use_price
from ringside.errors import UsageError
from ringside.view.server.guard import TOKEN, check_address

HELP = "show a run as a live page in the browser"
PORT = 8777
RUNS = Path("runs")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ringside serve`."""
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", nargs="?", type=Path, help="a run directory (default: the newest)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=PORT, help=f"port to listen on; 0: any free one (default: {PORT})")
    add("--token", metavar="T", help=f"token that readers must send; {TOKEN} keeps it out of `ps`")
    add("--allow-host", metavar="NAME", action="append", default=[], help="a name that a proxy gives this page")
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C; the address is printed on stdout."""
    use_price(None)  # the environment's rate, which the page tells costs by
    try:
        from ringside.view.server.app import PageServer
    except ImportError as error:
        raise UsageError(f"the page needs {error.name}: pip install 'torch-ringside[web]'") from None
    from ringside.view.server.feed import Runs, newest_run

    # a token on the command line is seen by every user of the machine (`ps`); the variable is not
    token = os.environ.get(TOKEN, "") if args.token is None else args.token
    host = check_address(args.host, token)
    if args.run_dir is not None and not args.run_dir.is_dir():
        raise UsageError(f"{args.run_dir} is no directory: give the directory a run printed on its last line")
    runs = Runs(args.run_dir or newest_run(RUNS), RUNS)
    server = PageServer(runs, host, args.port, token=token, names=args.allow_host)
    print(server.url, flush=True)
    print("Press Ctrl-C to stop.", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0
