"""The demo's training: a byte-level GPT on the source of Python's standard library, data-parallel, watched."""
