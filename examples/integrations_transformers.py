"""A Hugging Face Trainer, synchronised and watched: the line with `add_callback` is the only one added.

    torchrun --nproc-per-node 2 examples/integrations_transformers.py --steps 30

Every rank learns to copy sentences of different lengths. It requires `pip install transformers accelerate`.
"""

import argparse
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ringside.integrations.transformers import RingsideCallback

WORDS = 32


class Copier(nn.Module):
    """Says of every token which one it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Take tokens, shape (samples, tokens); return the loss and the scores."""
        scores = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def padded(sentences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Make one batch of sentences, as long as the longest."""
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(sentence) for sentence in sentences], batch_first=True)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train on the ranks that torchrun (or `accelerate launch`) started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    sentences = [torch.randint(WORDS, (int(length),)).tolist() for length in torch.randint(4, 40, (steps * 16,))]
    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(
            out, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(Copier(), settings, train_dataset=sentences, data_collator=padded)
        ringside = RingsideCallback()
        trainer.add_callback(ringside)  # the one line
        trainer.train()

    attachment = ringside.attachment
    if trainer.is_world_process_zero() and attachment is not None and attachment.session is not None:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
        print("gradients reduced by", ", ".join(f"{who}: {count}" for who, count in attachment.counters.items()))
        print("recorded in", attachment.session.path)


if __name__ == "__main__":
    main()
