"""Trains a head of Clover on rows of a finished job, for the job's own target, and writes it as a folder for `draft`.

    python -m exspec.jobs.train_clover OUTPUT FOLDER [--minutes 8] [--heads 3] [--rows 20000]

The target stays as it is. Each head's loss is the cross-entropy of the token that the target wrote, one, two and more
places further on (arXiv:2405.00263).
"""

import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from exspec.actors.engine.drafters.clover_head import CloverConfig, CloverHead
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.models import ModelError
from exspec.jobs.training import Batch, Example, batches, finished, optimizers_of
from exspec.pipeline.errors import JobError
from exspec.pipeline.output.owner import read_output, settings
from exspec.pipeline.shape import pair_of
from exspec.pipeline.storage import Folder

RATE = 1e-2
NOISE = 0.01
LAYER = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "rope_parameters", "attention_bias", "mlp_bias", "vocab_size",
)  # fmt: skip


def grown(target: PreTrainedModel, heads: int) -> CloverHead:
    """A head before any training: its layer is the target's last, its norms the target's, Q and K are nearly the
    identity, V and the MLPs zero. Where the target's layers are of another kind than Llama's, the head's is random."""
    text = target.config.get_text_config()
    head = CloverHead(CloverConfig(heads, **{name: getattr(text, name) for name in LAYER if hasattr(text, name)}))
    own, last = head.layers[0], list(layers_of(target))[-1]
    final = getattr(target.base_model, "norm", None)
    with torch.no_grad():
        for module, other in ((own, last), (head.input_norm, final), (head.norm, final)):
            found = other.state_dict() if other is not None else {}
            if {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in module.state_dict().items()}:
                module.load_state_dict(found)
        for matrix in (head.q_proj.weight, head.k_proj.weight):
            matrix.copy_(torch.eye(len(matrix)) + NOISE * torch.randn_like(matrix))
        for tensor in (head.v_proj.weight, *head.mlps.parameters()):
            tensor.zero_()
    return head


class Last:
    """Notes what leaves the last layer of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.hidden = torch.empty(0)
        list(layers_of(model))[-1].register_forward_hook(self._note)

    def _note(self, _: Any, __: Any, out: Any) -> None:
        self.hidden = out[0] if isinstance(out, tuple) else out


def losses(head: CloverHead, target: Any, last: Last, ids: Tensor, labels: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Cross-entropy of each head, and its share of right tokens. ids, labels: [B, S]."""
    with torch.no_grad():
        target.base_model(input_ids=ids, use_cache=False)
        score = target.get_output_embeddings()
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    width = ids.shape[1] - head.config.heads
    hidden = head(input_ids=ids, features=last.hidden, position_ids=places).logits[:, :width]
    found: list[Tensor] = []
    right: list[Tensor] = []
    for i in range(head.config.heads):
        ahead = slice(i + 1, i + 1 + width)
        hidden, said = head.step(i, hidden, score.weight[ids[:, ahead]])
        here = labels[:, ahead] != -100
        logits, wanted = score(said[here]).float(), labels[:, ahead][here]
        found.append(cross_entropy(logits, wanted))
        right.append((logits.argmax(-1) == wanted).float().mean())
    return found, right


def endless(examples: Sequence[Example], heads: int) -> Iterator[Batch]:
    """Batches of them, again and again: those that have a token for every head."""
    shuffle = random.Random(0)
    while True:
        for ids, labels in batches(examples, shuffle):
            if (labels[:, heads:] != -100).any():
                yield ids, labels


def train(target: PreTrainedModel, examples: Sequence[Example], heads: int, minutes: float, steps: int) -> CloverHead:
    """A head for the target, trained until the time is up or that many steps are made."""
    torch.manual_seed(0)
    target.requires_grad_(False)
    last, head = Last(target), grown(target, heads)
    placed: Any = head
    placed.to(target.device)
    optimizers = optimizers_of(head, [p for p in head.parameters() if p.ndim == 2], RATE)
    start, share = time.monotonic(), 0.0
    for step, (ids, labels) in enumerate(endless(examples, heads), 1):
        found, right = losses(head, target, last, ids.to(target.device), labels.to(target.device))
        torch.stack(found).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / 30, (1 + math.cos(math.pi * share)) / 2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        share = max((time.monotonic() - start) / (60 * minutes), step / steps)
        if step % 25 == 0 or share >= 1:
            told = "  ".join(f"{loss.item():.3f} ({part.item():.1%})" for loss, part in zip(found, right, strict=True))
            print(f"step {step}, {time.monotonic() - start:.0f} s: loss (right tokens) {told}", flush=True)
        if share >= 1:
            break
    return head


def main(
    output: Annotated[str, typer.Argument(help="The output of a finished job.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write the head into.")],
    heads: Annotated[int, typer.Option(min=1, help="Tokens that it is to draft, at most.")] = 3,
    rows: Annotated[int, typer.Option(min=1, help="Rows to learn from, about.")] = 20_000,
    minutes: Annotated[float, typer.Option(help="Minutes of training, at most.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training, at most.")] = 100_000,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train and write a head."""
    try:
        done = read_output(Folder(output, {}))
        job = settings(done.state.description, {})
        pair = pair_of(job, device, draft=False)
        examples = finished(job, done, pair, rows)
    except (JobError, ModelError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    print(f"{len(examples)} rows, {sum(len(r) for _, r in examples):,} tokens to learn", flush=True)
    dtype = pair.target.dtype
    head: Any = train(pair.target.float(), examples, heads, minutes, steps)
    head.to(dtype).save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
