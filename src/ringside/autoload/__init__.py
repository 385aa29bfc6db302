"""Attaches Ringside to scripts that know nothing of it: this directory is put on PYTHONPATH by `ringside run`."""
