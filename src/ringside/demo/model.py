"""A GPT over bytes, in plain PyTorch: small enough for two cores, big enough that its loss clearly falls."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

SYMBOLS = 256


@dataclass(frozen=True)
class Size:
    """How big the model is and how much it is given per step.

    Args:
        width: Features per position.
        layers: Number of blocks.
        heads: Attention heads per block; `width` is a multiple of it.
        context: Positions per sequence, bytes.
        batch: Sequences per rank and step.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(width=32, layers=2, heads=2, context=32, batch=2),
    "small": Size(width=256, layers=4, heads=8, context=128, batch=4),
    "light": Size(width=256, layers=4, heads=8, context=16, batch=2),  # as many gradients, a thirtieth of the work
}


class Block(nn.Module):
    """Attention to what came before, then a layer per position, each added to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.mix = nn.Linear(size.width, size.width)
        self.norm_layer = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [batch, context, width] to the same shape."""
        x = x + self.mix(self._attend(self.query_key_value(self.norm_attention(x))))
        narrowed: Tensor = self.narrow(F.gelu(self.widen(self.norm_layer(x))))
        return x + narrowed

    def _attend(self, packed: Tensor) -> Tensor:
        batch, length, triple = packed.shape
        query, key, value = packed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, triple // 3)


class ByteGPT(nn.Module):
    """Predicts every byte from the bytes before it.

    Args:
        size: How big it is.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, SYMBOLS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss in nats per byte, float32 [], of int64 [batch, context + 1] bytes."""
        x = self.symbols(text[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
