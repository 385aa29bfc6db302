"""`ringside VERB ...` where other verbs may not be importable, as their extras are missing."""

from __future__ import annotations

import sys

from ringside.commands import build_parser

args = build_parser(verbs=(sys.argv[1],)).parse_args(sys.argv[1:])
sys.exit(args.command.run(args))
