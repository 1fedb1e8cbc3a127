"""Batches and optimizers, which all trainings share."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

TOKENS_PER_STEP = 3072
Batch = tuple[Tensor, Tensor]  # ids [B, S], and labels [B, S]: the next token if it is learned, else -100
Example = tuple[list[int], list[int]]  # tokens of a prompt, and of its completion


def batches(examples: Sequence[Example], shuffle: random.Random) -> Iterator[Batch]:
    """Every example once, in batches of about TOKENS_PER_STEP tokens, right-padded with zeros.

    Examples of similar length share a batch. Only the completions' tokens are learned.
    """
    made: list[list[Example]] = [[]]
    for row in sorted(examples, key=lambda row: sum(map(len, row))):
        if made[-1] and (len(made[-1]) + 1) * sum(map(len, row)) > TOKENS_PER_STEP:
            made.append([])
        made[-1].append(row)
    shuffle.shuffle(made)
    for batch in made:
        width = max(len(p) + len(r) for p, r in batch) - 1
        ids, labels = torch.zeros(len(batch), width, dtype=torch.long), torch.full((len(batch), width), -100)
        for i, (p, r) in enumerate(batch):
            ids[i, : len(p) + len(r) - 1] = torch.tensor([*p, *r[:-1]])
            labels[i, len(p) - 1 : len(p) + len(r) - 1] = torch.tensor(r)
        yield ids, labels


def optimizers_of(model: Any, matrices: list[torch.nn.Parameter], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the model's other parameters."""
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
