"""Trains a Clover head on the rows of a finished job, for the job's own target. `draft` takes the folder it writes.

    python -m exspec.jobs.training.clover OUTPUT FOLDER [--minutes 8] [--heads 3] [--rows 20000]

The target's weights do not change. Each head's loss is the cross-entropy of the token that the target wrote one, two or
more positions further on (arXiv:2405.00263).
"""

import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from exspec.actors.engine import Request
from exspec.actors.engine.drafters.clover_head import CloverConfig, CloverHead
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.models import Pair
from exspec.actors.source import ModelError
from exspec.jobs.finished import check_map, choose, read_rows
from exspec.jobs.training.examples import Batch, Example, batches, optimizers_of
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.snapshot import vanished
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.job.settings import Job
from exspec.pipeline.output.owner import Output, read_output
from exspec.pipeline.shape import pair_of
from exspec.pipeline.storage import Folder

RATE = 1e-2
NOISE = 0.01
LLAMAS = ("llama", "mistral")  # families whose layers have the same modules as the head's layer
ANY = ("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "vocab_size")
LAYER = ("intermediate_size", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias")


def training_examples(job: Job, output: Output, pair: Pair, rows: int) -> list[Example]:
    """Prompts and the target's tokens, from about `rows` rows of a finished job.

    Rows without a completion are left out, and so are rows whose text does not encode to the tokens that were counted.
    Raises JobError if no row is left.
    """
    examples: list[Example] = []
    gone = vanished(output.state.plan.shards, job.storage_options)
    for row in read_rows(job, output, pair, choose(output, rows, None, 0, gone)):
        if row.request is None or row.completion is None:
            continue
        tokens = list(pair.tokenizer(row.completion, add_special_tokens=False)["input_ids"])
        if row.tokens == len(tokens) + 1:
            tokens += _end(row.request, pair)
        elif row.tokens != len(tokens):
            continue
        if tokens:
            examples.append((list(row.request.prompt), tokens))
    if not examples:
        raise JobError(f"{output.folder.url}: no row has a completion to learn from")
    return examples


def _end(request: Request, pair: Pair) -> list[int]:
    """The token that ended the completion, or nothing if it could have been one of several."""
    ends = model_end_ids(pair.target) | request.end_ids
    return list(ends) if len(ends) == 1 and request.stop is None and not request.ignore_end else []


def new_head(target: PreTrainedModel, heads: int) -> CloverHead:
    """A head before training.

    Q and K are nearly the identity; V and the MLPs are zero. For a Llama target the head's layer and norms are copies
    of the target's last layer and norm. For another target the layer is random and the norms are ones.
    """
    text, alike = target.config.get_text_config(), target.config.model_type in LLAMAS
    values = {name: deepcopy(getattr(text, name)) for name in (*ANY, *LAYER * alike) if hasattr(text, name)}
    head = CloverHead(CloverConfig(heads, **{"intermediate_size": 4 * text.hidden_size} | values))
    with torch.no_grad():
        if alike:
            base: Any = target.base_model
            head.layers[0].load_state_dict(list(layers_of(target))[-1].state_dict())
            for norm in (head.input_norm, head.norm):
                norm.load_state_dict(base.norm.state_dict())
        for matrix in (head.q_proj.weight, head.k_proj.weight):
            matrix.copy_(torch.eye(len(matrix)) + NOISE * torch.randn_like(matrix))
        for tensor in (head.v_proj.weight, *head.mlps.parameters()):
            tensor.zero_()
    return head


class LastHidden:
    """Records the hidden states that leave the last layer of a model, until `remove` is called."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.hidden = torch.empty(0)
        self.hook = list(layers_of(model))[-1].register_forward_hook(self._record)

    def _record(self, _: Any, __: Any, out: Any) -> None:
        self.hidden = out[0] if isinstance(out, tuple) else out

    def remove(self) -> None:
        self.hook.remove()


def losses(head: CloverHead, target: Any, last: LastHidden, ids: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cross-entropy and share of right tokens, for each head that has a token to learn. ids, labels: [B, S]."""
    with torch.no_grad():
        target.base_model(input_ids=ids, use_cache=False)
        score = target.get_output_embeddings()
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = head(input_ids=ids, features=last.hidden, position_ids=positions).logits
    found: list[tuple[Tensor, Tensor]] = []
    for i in range(head.config.heads):
        learned = labels[:, i + 1 :] != -100
        if not learned.any():
            break
        hidden, output = head.step(i, hidden[:, : learned.shape[1]], score.weight[ids[:, i + 1 :]])
        logits, wanted = score(output[learned]).float(), labels[:, i + 1 :][learned]
        found.append((cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean()))
    return found


def endless_batches(examples: Sequence[Example]) -> Iterator[Batch]:
    """Batches of the examples, in a new order after each pass."""
    shuffle = random.Random(0)
    while True:
        yield from batches(examples, shuffle)


def train(target: PreTrainedModel, examples: Sequence[Example], heads: int, minutes: float, steps: int) -> CloverHead:
    """Train a head for the target, for so many minutes or steps, whichever ends first.

    Only examples whose prompt and completion together have at least `heads` + 2 tokens are used, so that every head
    learns from each. Raises JobError if there are none.
    """
    if not (long := [(p, r) for p, r in examples if min(len(r), len(p) + len(r) - 1 - heads) > 0]):
        raise JobError(f"--heads {heads}: no row has at least {heads + 2} tokens")
    torch.manual_seed(0)
    target.requires_grad_(False)
    last, head = LastHidden(target), new_head(target, heads)
    placed: Any = head
    placed.to(target.device)
    optimizers = optimizers_of(head, [p for p in head.parameters() if p.ndim == 2], RATE)
    start, share = time.monotonic(), 0.0
    for step, (ids, labels) in enumerate(endless_batches(long), 1):
        found = losses(head, target, last, ids.to(target.device), labels.to(target.device))
        torch.stack([loss for loss, _ in found]).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / 30, (1 + math.cos(math.pi * share)) / 2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        share = max((time.monotonic() - start) / (60 * minutes), step / steps)
        if step % 25 == 0 or share >= 1:
            figures = "  ".join(f"{loss.item():.3f} ({part.item():.1%})" for loss, part in found)
            print(f"step {step}, {time.monotonic() - start:.0f} s: loss (right tokens) {figures}", flush=True)
        if share >= 1:
            break
    last.remove()
    return head


def main(
    output: Annotated[str, typer.Argument(help="Output folder of a finished job.")],
    folder: Annotated[Path, typer.Argument(help="New or empty folder for the head.")],
    heads: Annotated[int, typer.Option(min=1, help="Tokens that the head can draft, at most.")] = 3,
    rows: Annotated[int, typer.Option(min=1, help="Rows to learn from, approximately.")] = 20_000,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes of training, at most.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training, at most.")] = 100_000,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model or the job.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors.")
    ] = False,
) -> None:
    """Train a head and write it."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise JobError(f"{folder}: holds something; expected an empty or a new folder")
        if device != "cpu" and not torch.cuda.is_available():
            raise JobError(f"--device {device}: this machine has no GPU that torch can use")
        done = read_output(Folder(output, {}))
        permissions = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
        job = stored_job(done.state.description, {}).model_copy(update=permissions)
        check_map(job, output)
        pair = pair_of(job, device, draft=False)
        examples = training_examples(job, done, pair, rows)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{len(examples)} rows, {sum(len(r) for _, r in examples):,} tokens to learn", flush=True)
        dtype = pair.target.dtype
        head: Any = train(pair.target.float(), examples, heads, minutes, steps)
    except (JobError, ModelError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    head.to(dtype).save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
