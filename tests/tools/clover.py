"""Which parts of a Clover head matter: trains it whole and without each of them.

    python -m tests.tools.clover OUTPUT [--rows 2000] [--steps 600]

OUTPUT is a job's. Each line is a JSON object about rows that were held out, as they are decoded. right: the share of
drafts whose first token was right, whose first two were, and so on.
"""

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from torch.nn.functional import silu
from transformers.modeling_outputs import CausalLMOutput

from exspec.actors.engine.drafters import clover_head
from exspec.actors.engine.drafters.clover_head import CloverHead
from exspec.jobs.training.run import Training, measure, use_cores
from exspec.jobs.training.settings import TrainSettings


def without_gate(query: Tensor, *_: Any, **__: Any) -> Tensor:
    """h_i = h_{i-1} + V e_i: every cosine is 1."""
    return torch.ones_like(query[..., 0])


def without_regression(self: CloverHead, number: int, hidden: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """h_i = h_0: no step knows the tokens before it."""
    return hidden, hidden + silu(self.mlps[number](hidden))


def without_augmenting_block(self: CloverHead, *_: Any, features: Tensor, logits_to_keep: int = 0, **__: Any) -> Any:
    """h_0 = norm(H)."""
    return CausalLMOutput(logits=self.norm(features[:, -logits_to_keep:]))


VARIANTS: dict[str, tuple[Any, str, Any] | None] = {  # what is replaced, and by what
    "full": None,
    "without gate": (clover_head, "cosine_similarity", without_gate),
    "without regression": (CloverHead, "step", without_regression),
    "without augmenting block": (CloverHead, "forward", without_augmenting_block),
}


def measured(output: str, name: str, rows: int, steps: int) -> dict[str, Any]:
    """Train the variant and decode the rows that were held out."""
    change = VARIANTS[name]
    with tempfile.TemporaryDirectory() as work, patch.object(*change) if change else nullcontext():
        settings = TrainSettings(drafter="clover", rows=rows, steps=steps, minutes=600.0)
        training = Training(output, {}, settings, Path(work))
        job, pair = training.load()
        found = training.rows(job, pair)
        training.run(training.learner(pair, found.learned), pair, found, lambda line: print(line, file=sys.stderr))
        pair, drafts, _ = training.made(pair, job)
        counts = measure(pair, [request for request, _ in found.held], "clover", drafts)
    shares = zip(counts.accepted_by_position, counts.drafted_by_position, strict=True)
    right = [round(accepted / drafted, 4) for accepted, drafted in shares]
    return {"variant": name, "right": right, "accept_length": round(counts.mean_accepted_length, 3)}


def main(
    output: Annotated[str, typer.Argument(help="Output folder of a job.")],
    rows: Annotated[int, typer.Option(help="Rows to read. A tenth is held out.")] = 2000,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 600,
) -> None:
    """Train and measure every variant."""
    use_cores(1)
    for name in VARIANTS:
        print(json.dumps(measured(output, name, rows, steps)), flush=True)


if __name__ == "__main__":
    typer.run(main)
