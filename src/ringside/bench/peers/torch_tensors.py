"""Torch tensors over the memory of NumPy arrays."""

from __future__ import annotations

from typing import Any

import torch


def as_torch(array: Any, dtype: str) -> torch.Tensor:
    """Return a tensor over an array's memory; a bfloat16 array comes as int16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
