"""`torchrun ... -m ringside.survive train.py`: the keeper of one rank."""

import sys

from ringside.errors import UsageError
from ringside.survive.supervisor import main

try:
    sys.exit(main(sys.argv[1:]))
except UsageError as problem:
    print(f"ringside survive: {problem}", file=sys.stderr)
    sys.exit(problem.exit_status)
