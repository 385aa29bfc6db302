"""Is killed when a checkpoint is nearly written."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ringside.survive.state.checkpoint import Checkpoints

FileSystemWriter.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Checkpoints(Path(sys.argv[1])).write({"model": {"w": torch.zeros(1000)}, "step": 7})
