"""Trains a head of Clover on rows of a finished job, for the job's own target, and writes it as a folder for `draft`.

    python -m exspec.jobs.training.clover OUTPUT FOLDER [--minutes 8] [--heads 3] [--rows 20000]

The target's weights stay as they are. Each head's loss is the cross-entropy of the token that the target wrote, one,
two and more places further on (arXiv:2405.00263).
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
from exspec.actors.exactness import ModelError
from exspec.actors.models import Pair
from exspec.jobs.commands.audit import check_map, choose, read_rows
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
LLAMAS = ("llama", "mistral")  # whose layers are as the head's
ANY = ("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "vocab_size")
LAYER = ("intermediate_size", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias")


def finished(job: Job, output: Output, pair: Pair, rows: int) -> list[Example]:
    """About so many rows of a job, of those that have a completion: prompts as they were decoded, and the target's
    tokens. A row is left out whose text does not tell them.

    Raises JobError where there is none.
    """
    found: list[Example] = []
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
            found.append((list(row.request.prompt), tokens))
    if not found:
        raise JobError(f"{output.folder.url}: no row has a completion to learn from")
    return found


def _end(request: Request, pair: Pair) -> list[int]:
    """The token that has ended a completion, where it can have been one alone."""
    ends = model_end_ids(pair.target) | request.end_ids
    return list(ends) if len(ends) == 1 and request.stop is None and not request.ignore_end else []


def grown(target: PreTrainedModel, heads: int) -> CloverHead:
    """A head before any training: Q and K are nearly the identity, V and the MLPs zero. Where the target is a Llama the
    layer is its last one, and the norms are its own; else they are random, and ones."""
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


class Last:
    """Notes what leaves the last layer of a model, until it is let go."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.hidden = torch.empty(0)
        self.hook = list(layers_of(model))[-1].register_forward_hook(self._note)

    def _note(self, _: Any, __: Any, out: Any) -> None:
        self.hidden = out[0] if isinstance(out, tuple) else out

    def let_go(self) -> None:
        self.hook.remove()


def losses(head: CloverHead, target: Any, last: Last, ids: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cross-entropy of each head that has a token to learn, and its share of right tokens. ids, labels: [B, S]."""
    with torch.no_grad():
        target.base_model(input_ids=ids, use_cache=False)
        score = target.get_output_embeddings()
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = head(input_ids=ids, features=last.hidden, position_ids=places).logits
    found: list[tuple[Tensor, Tensor]] = []
    for i in range(head.config.heads):
        here = labels[:, i + 1 :] != -100
        if not here.any():
            break
        hidden, said = head.step(i, hidden[:, : here.shape[1]], score.weight[ids[:, i + 1 :]])
        logits, wanted = score(said[here]).float(), labels[:, i + 1 :][here]
        found.append((cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean()))
    return found


def endless(examples: Sequence[Example]) -> Iterator[Batch]:
    """Batches of them, again and again."""
    shuffle = random.Random(0)
    while True:
        yield from batches(examples, shuffle)


def train(target: PreTrainedModel, examples: Sequence[Example], heads: int, minutes: float, steps: int) -> CloverHead:
    """A head for the target, trained until the time is up or that many steps are made. Every head learns of the
    examples that have so many tokens and two more, prompt and completion together.

    Raises JobError where that is none.
    """
    if not (long := [(p, r) for p, r in examples if min(len(r), len(p) + len(r) - 1 - heads) > 0]):
        raise JobError(f"--heads {heads}: no row has so many tokens and two more")
    torch.manual_seed(0)
    target.requires_grad_(False)
    last, head = Last(target), grown(target, heads)
    placed: Any = head
    placed.to(target.device)
    optimizers = optimizers_of(head, [p for p in head.parameters() if p.ndim == 2], RATE)
    start, share = time.monotonic(), 0.0
    for step, (ids, labels) in enumerate(endless(long), 1):
        found = losses(head, target, last, ids.to(target.device), labels.to(target.device))
        torch.stack([loss for loss, _ in found]).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / 30, (1 + math.cos(math.pi * share)) / 2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        share = max((time.monotonic() - start) / (60 * minutes), step / steps)
        if step % 25 == 0 or share >= 1:
            told = "  ".join(f"{loss.item():.3f} ({part.item():.1%})" for loss, part in found)
            print(f"step {step}, {time.monotonic() - start:.0f} s: loss (right tokens) {told}", flush=True)
        if share >= 1:
            break
    last.let_go()
    return head


def main(
    output: Annotated[str, typer.Argument(help="The output of a finished job.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write the head into.")],
    heads: Annotated[int, typer.Option(min=1, help="Tokens that it is to draft, at most.")] = 3,
    rows: Annotated[int, typer.Option(min=1, help="Rows to learn from, about.")] = 20_000,
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
    """Train and write a head."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise JobError(f"{folder}: holds something; expected an empty folder, or one that is to be made")
        if device != "cpu" and not torch.cuda.is_available():
            raise JobError(f"--device {device}: this machine has no GPU that torch can use")
        done = read_output(Folder(output, {}))
        permissions = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
        job = stored_job(done.state.description, {}).model_copy(update=permissions)
        check_map(job, output)
        pair = pair_of(job, device, draft=False)
        examples = finished(job, done, pair, rows)
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
