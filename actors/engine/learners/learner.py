"""The interface between the trainer and a drafter that can be trained.

A learner is a class in a file of this folder; its drafter names it. It grows a model from a target, and has a loss for
a batch of what the target has written. The target's weights never change.
"""

from abc import ABC, abstractmethod
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exspec.actors.engine.kv.cached_model import kv_shape
from exspec.actors.engine.layers.spans import layers_of

SHAPE = ("hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size", "intermediate_size",
         "hidden_act", "rms_norm_eps", "rope_parameters")  # fmt: skip


class Lesson(NamedTuple):
    """A batch of texts, padded on the right.

    tokens: [R, S]. text: [R, S], all but padding. What the target thinks of the next token is learned at every place of
    a text, its prompt included. own: [R, S], the tokens that the target has written, where drafts are judged. states:
    [R, S, F], the target's hidden states after the learner's layers.
    """

    tokens: Tensor
    text: Tensor
    own: Tensor
    states: Tensor

    def to(self, device: torch.device) -> "Lesson":
        return Lesson(*(t.to(device, non_blocking=True) for t in self))


class Outcome(NamedTuple):
    """loss: a scalar. right: [N, K], for N places of a draft whether its tokens are those of the target. known: [N, K],
    whether the text has such a token."""

    loss: Tensor
    right: Tensor
    known: Tensor

    @classmethod
    def of_steps(cls, losses: list[Tensor], right: list[Tensor], known: list[Tensor]) -> "Outcome":
        """The outcome of drafts in steps. right, known: of each step, [R, S]; place s is where a draft began."""
        begun = known[0]
        found, there = (torch.stack([t[begun] for t in each], dim=-1) for each in (right, known))
        return cls(torch.stack(losses).sum(), found, there)


@dataclass(frozen=True)
class Growth:
    """How to make a new model for a target.

    drafts: K, the tokens of a draft. layers: of the new model; None: as many as the learner thinks right. counts: how
    often the target wrote each token.
    """

    drafts: int
    layers: int | None = None
    counts: Counter[int] = field(default_factory=Counter)


class Learner(ABC):
    """Trains one drafter for one target.

    drafts: K, unless the user sets it. rate: the highest learning rate. model: what is trained, in float32. layers: of
    the target, counted from 1; the lessons have the hidden states after them.
    """

    drafts: ClassVar[int] = 5
    rate: float = 4e-3
    layers: tuple[int, ...]

    @classmethod
    @abstractmethod
    def grow(cls, target: PreTrainedModel, growth: Growth) -> PreTrainedModel:
        """A new model for a target, before training. Raises ValueError if none can be made."""

    def __init__(self, target: PreTrainedModel, model: PreTrainedModel, drafts: int) -> None:
        self.target: Any = target
        self.model: Any = model
        self.count = drafts
        self.score: Any = target.get_output_embeddings()
        self.norm = final_norm(target)

    def wanted(self, states: Tensor) -> Tensor:
        """The target's logits [N, V] from its states [N, D] after the last layer."""
        return logits_of(self.target, self.norm(states))

    @abstractmethod
    def outcome(self, lesson: Lesson) -> Outcome:
        """The loss of a lesson, with gradients."""

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon trains: the matrices, without embeddings and output heads."""
        head = self.model.get_output_embeddings()
        tables = [m.weight for m in self.model.modules() if m is head or isinstance(m, nn.Embedding)]
        return [
            p for p in self.model.parameters() if p.ndim == 2 and p.requires_grad and all(p is not t for t in tables)
        ]

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the model as `load_draft` reads it."""
        deepcopy(self.model).to(dtype).save_pretrained(folder)


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """A model's logits [N, V], in float32, from the input [N, D] of its output head. Some families scale or cap them,
    so the model's own forward computes them: behind a base model that has run on one token."""

    def replaced(_: nn.Module, __: Any, output: Any) -> Any:
        output.last_hidden_state = hidden[None]
        return output

    hook = model.base_model.register_forward_hook(replaced)
    try:
        logits: Tensor = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=hidden.device), use_cache=False)[0]
    finally:
        hook.remove()
    return logits[0].float()


def shape_of(target: PreTrainedModel) -> dict[str, Any]:
    """The settings of a target's layers that a head's layers can share."""
    text: Any = target.config.get_text_config()
    _, kv_heads, size = kv_shape(target.config)
    heads = {"num_key_value_heads": kv_heads, "head_dim": size}
    shape = {name: deepcopy(getattr(text, name)) for name in SHAPE if getattr(text, name, None) is not None}
    if "full_attention" in (rope := shape.get("rope_parameters", {})):  # each kind of layer has its own
        shape["rope_parameters"] = rope["full_attention"]
    return heads | {"intermediate_size": 4 * text.hidden_size} | shape


@torch.no_grad()
def final_norm(target: PreTrainedModel) -> nn.Module:
    """The module that makes the input of the target's output head from the last layer's output."""
    model: Any = target
    last = list(layers_of(target))[-1]
    seen: list[tuple[Tensor, nn.Module, Tensor]] = []  # inputs, modules and outputs
    wanted: list[Tensor] = []
    ends: list[Tensor] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        if inputs and isinstance(out, Tensor):
            seen.append((inputs[0], module, out))

    hooks = [m.register_forward_hook(record) for m in target.base_model.modules() if m is not target.base_model]
    hooks.append(last.register_forward_hook(lambda *call: ends.append(_first(call[2]))))
    hooks.append(model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: wanted.append(inputs[0])))
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    for before, module, out in reversed(seen):
        if before is ends[-1] and torch.equal(out[:, -wanted[0].shape[1] :], wanted[0]):
            return module
    raise ValueError(f"{type(target).__name__} has no norm between its last layer and its output head")


@torch.no_grad()
def copy_norm(norm: nn.Module, to: nn.Module) -> None:
    """Copy a norm's weights, if it then computes the same. Gemma's norms add one to their weight."""
    before, weights = deepcopy(to.state_dict()), norm.state_dict()
    if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in before.items()}:
        return
    to.load_state_dict(weights)
    (weight,) = weights.values()
    probe = torch.linspace(-1, 1, len(weight)).to(weight)
    if not torch.allclose(norm(probe).float().cpu(), to(probe.float().cpu()), rtol=0.02, atol=0.02):
        to.load_state_dict(before)


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def spread(count: int, first: int, last: int) -> list[int]:
    """`count` numbers from `first` to `last`, evenly spaced and rounded."""
    if count == 1:
        return [(first + last) // 2]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def runs(right: Tensor, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Drafts of `count` tokens from guesses of single tokens: right and known, [R * S, count].

    A draft's token is compared only if all tokens before it are right. Then the guess after the target's own tokens is
    the guess of the draft. right, own: [R, S]; guess s is of token s.
    """
    wide = [torch.nn.functional.pad(t, (0, count - 1)).unfold(1, count, 1) for t in (right, own)]
    start = own[..., None]  # a draft begins at each of the target's tokens
    found, known = (t[start.expand_as(t)].view(-1, count) for t in wide)
    return found, known
