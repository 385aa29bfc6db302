"""What proves parts of Ringside and is no part of the package: nothing in `src/ringside` imports it."""
