"""Trains an EAGLE-3 head for the demo target, and writes it in the authors' format.

    python -m tests.tools.train_eagle3 FOLDER [--minutes 8]

This is the paper's training-time test (arXiv:2503.01840): STEPS draft steps in a row, each on the head's output of the
step before. In step i, the column of token t attends to the columns of the tokens up to t in the first step, and to its
own columns of the steps since.
"""

import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from exspec.actors.engine.drafters.eagle3 import Eagle3
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head
from exspec.jobs.demo import TARGET
from exspec.jobs.training.demo import stream_of
from exspec.jobs.training.examples import optimizers_of
from tests.actors.engine.drafters.test_eagle3 import as_published

STEPS, DECAY, RATE = 4, 0.8, 4e-3
SEED, COUNTED = 7, 40  # seed of the messages; batches from which the draft vocabulary is counted
PROPOSED = 640  # tokens that the head can propose


class Unrolled:
    """Runs the head over whole sequences, step by step, with gradients."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head, self.layer = head, head.layers[0]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """The hidden states [R, S, D] of the next step."""
        layer: Any = self.layer
        attention, number = layer.self_attn, len(self.keys)
        rows, width, _ = feature.shape
        normed = layer.hidden_norm(feature)
        x = torch.cat([layer.input_layernorm(embedding), normed], dim=-1)
        query, key, value = (
            project(x).view(rows, width, -1, attention.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        turns = self.head.rotary_emb(x, torch.arange(number, number + width)[None])
        query, key = apply_rotary_pos_emb(query, key, *turns)
        groups = attention.num_key_value_groups
        self.keys.append(key.repeat_interleave(groups, 1))
        self.values.append(value.repeat_interleave(groups, 1))
        before = (query @ self.keys[0].transpose(2, 3)).masked_fill(torch.ones(width, width).triu(1).bool(), -torch.inf)
        own = [(query * k).sum(-1, keepdim=True) for k in self.keys[1:]]
        weights = (torch.cat([before, *own], dim=-1) * attention.scaling).softmax(-1)
        mixed = weights[..., :width] @ self.values[0]
        for i, v in enumerate(self.values[1:]):
            mixed = mixed + weights[..., width + i : width + i + 1] * v
        hidden = (normed if layer.norm_before_residual else feature) + attention.o_proj(
            mixed.transpose(1, 2).reshape(rows, width, -1)
        )
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


def losses(head: Eagle3Head, target: Any, ids: Tensor, labels: Tensor, aux_layers: tuple[int, ...]) -> list[Tensor]:
    """Cross-entropy of each step against the target's distribution over the tokens that the head can propose."""
    with torch.no_grad():
        output = target(input_ids=ids, output_hidden_states=True)
        known = torch.arange(head.config.draft_vocab_size) + head.d2t
        wanted = output.logits.float()[..., known].softmax(-1)
        right = torch.isin(output.logits.argmax(-1), known) & (labels != -100)
        embedded = target.get_input_embeddings()(ids)
        states = torch.cat([output.hidden_states[n] for n in aux_layers], dim=-1)
    unrolled, found = Unrolled(head), []
    feature = head.fc(states)
    width = ids.shape[1] - STEPS
    for i in range(STEPS):
        feature = unrolled.step(embedded[:, 1 + i : 1 + i + width], feature[:, :width])
        logits = head.lm_head(head.norm(feature))
        here = right[:, 1 + i : 1 + i + width]
        found.append(cross_entropy(logits[here].float(), wanted[:, 1 + i : 1 + i + width][here]))
    return found


def main(
    folder: Path,
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps of training, at most.")] = 100_000,
) -> None:
    """Train a head and write it."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    stream = stream_of(SEED, 100_000, tokenizer)
    counts = Counter(t for _, labels in islice(stream, COUNTED) for t in labels[labels != -100].tolist())
    used = torch.tensor(sorted(token for token, _ in counts.most_common(PROPOSED)))
    config = Eagle3Config(
        draft_vocab_size=len(used), vocab_size=target.config.vocab_size, hidden_size=target.config.hidden_size,
        intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
    )  # fmt: skip
    config._attn_implementation = "eager"
    head = Eagle3Head(config)
    head.d2t += used - torch.arange(len(used))
    aux_layers = Eagle3.aux_layers_of(target.config, config)
    matrices = [p for p in [*head.layers.parameters(), head.fc.weight] if p.ndim == 2]
    optimizers = optimizers_of(head, matrices, RATE)
    start, step, share = time.monotonic(), 0, 0.0
    while share < 1 and step < steps:
        found = losses(head, target, *next(stream), aux_layers)
        torch.stack([DECAY**i * loss for i, loss in enumerate(found)]).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 30, (1 - share) / 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, share = step + 1, (time.monotonic() - start) / (60 * minutes)
        if step % 25 == 0:
            figures = " ".join(f"{loss.item():.3f}" for loss in found)
            print(f"step {step} {60 * minutes * share:.0f} s: {figures}", flush=True)
    as_published(head, folder, "authors")


if __name__ == "__main__":
    typer.run(main)
