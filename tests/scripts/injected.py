"""A fault in a process of its own."""

from __future__ import annotations

import sys

import torch

from ringside.faults.inject import inject, parse_fault

model = torch.nn.Linear(2, 2)
injector = inject(parse_fault(sys.argv[1]), model, 0)
injector.step(0)
print("ready", flush=True)
model(torch.ones(2)).sum().backward()
print("alive")
