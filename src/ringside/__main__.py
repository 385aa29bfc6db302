"""`python -m ringside` is `ringside`."""

from ringside.commands import main

raise SystemExit(main())
