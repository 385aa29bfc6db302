"""Hardware: hosts, ranks, link classes with their latency and bandwidth.

files     A topology from a preset's name, a TOML file, or what `ringside probe` wrote
topology  Where ranks are and what joins them: hosts, link classes, network interfaces, and the links that differ
wires     A topology as arrays: what a message costs by itself, and what it shares with others
"""
