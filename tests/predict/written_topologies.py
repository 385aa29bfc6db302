"""A topology as a user writes it."""

from __future__ import annotations

BOXES = """
schema = 1
name = "boxes"
hosts = 2
ranks_per_host = [4, 2]
nics = 2
rails = "own"
oversubscription = 2.0
[inside]
kind = "pcie"
alpha_s = 2.5e-6
bytes_per_s = 24e9
[between]
kind = "roce"
alpha_s = 4e-6
bytes_per_s = 12e9
[[override]]
hosts = [0, 1]
bytes_per_s = 3e9
[[override]]
ranks = [1, 2]
alpha_s = 1e-5
one_way = true
"""
