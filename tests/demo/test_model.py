from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
import torch
import torch.nn.functional as F

from ringside.demo.model import SIZES, SYMBOLS, Block, ByteGPT, Size

SIZE = Size(width=24, layers=3, heads=4, context=7, batch=2)


def attended(block: Block, x: torch.Tensor) -> torch.Tensor:
    """A block as the books have it: every head's scores written out, and the future hidden."""
    batch, length, width = x.shape
    packed = block.query_key_value(F.layer_norm(x, (width,), block.norm_attention.weight, block.norm_attention.bias))
    query, key, value = (part.view(batch, length, block.heads, -1).transpose(1, 2) for part in packed.chunk(3, dim=-1))
    scores = query @ key.transpose(-1, -2) / math.sqrt(width // block.heads)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    x = x + block.mix((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width))
    inner = F.gelu(block.widen(F.layer_norm(x, (width,), block.norm_layer.weight, block.norm_layer.bias)))
    return x + block.narrow(inner)


def test_the_loss_is_that_of_a_gpt_written_out():
    torch.manual_seed(3)
    model = ByteGPT(SIZE)
    text = torch.randint(0, SYMBOLS, (2, SIZE.context + 1))
    x = model.symbols.weight[text[:, :-1]] + model.positions.weight
    for block in model.blocks:
        x = attended(block, x)
    scores = F.layer_norm(x, (SIZE.width,), model.norm.weight, model.norm.bias) @ model.head.weight.T + model.head.bias
    chances = scores.log_softmax(-1).gather(-1, text[:, 1:, None])
    assert model(text).item() == pytest.approx(-chances.mean().item(), rel=1e-5)
    assert len(model.blocks) == SIZE.layers
    assert model.blocks[0].widen.out_features == 4 * SIZE.width


def test_it_begins_knowing_nothing():
    torch.manual_seed(0)
    model = ByteGPT(SIZES["tiny"])
    spread = {name: values.std().item() for name, values in model.named_parameters() if values.dim() > 1}
    assert list(spread.values()) == pytest.approx([0.02] * len(spread), rel=0.15)
    assert torch.equal(model.norm.weight, torch.ones_like(model.norm.weight))
    text = torch.randint(0, SYMBOLS, (4, SIZES["tiny"].context + 1))
    assert model(text).item() == pytest.approx(math.log(SYMBOLS), rel=0.02)


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 43_000), ("small", 3_300_000), ("light", 3_300_000)])
def test_sizes_are_what_two_cores_can_train(name: str, parameters: int):
    size = SIZES[name]
    assert size.width % size.heads == 0
    assert sum(values.numel() for values in ByteGPT(size).parameters()) == pytest.approx(parameters, rel=0.05)
    assert (size.context, size.batch) == {"tiny": (32, 2), "small": (128, 4), "light": (16, 2)}[name]
