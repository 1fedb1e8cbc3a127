"""The common base of drafters with a head: a small network for one target that reads the target's hidden states."""

import json
from abc import abstractmethod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Self, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.drafter import Draft, DrafterContext
from exspec.actors.engine.drafters.model import DraftModel
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.kv.memory import MemoryPlan, states_memory
from exspec.actors.engine.kv.trial import spans_trial
from exspec.actors.engine.scheduling.group import Group

M = TypeVar("M", bound=PreTrainedModel)
C = TypeVar("C", bound=PretrainedConfig)


class HeadDrafter(DraftModel):
    """A head has its own KV. At each position it is fed the features, which are the target's hidden states there, and,
    if it uses one, the token after the position: token j at position j - 1.

    Features lie in pages, as KV does. The tokens that a round chooses are fed as soon as their features are known.

    asks: what draft it needs, for messages. configures: the class of the head's config. remembers: layers of the head
    whose hidden states the next step needs. aux_layers: layers of the target whose outputs are the features.
    """

    follows: ClassVar[bool] = True
    inside: ClassVar[bool] = True
    asks: ClassVar[str]
    configures: ClassVar[type[PretrainedConfig]]
    remembers: ClassVar[tuple[int, ...]] = ()
    aux_layers: tuple[int, ...]
    target: PagedModel
    head: PagedModel

    @classmethod
    def longest(cls, draft: PretrainedConfig) -> int | None:
        """The most tokens that the head can draft; None if there is no limit."""
        del draft
        return None

    @classmethod
    def lengths_with(cls, draft: PretrainedConfig | None) -> tuple[int, ...]:
        longest = cls.longest(draft) if isinstance(draft, cls.configures) else None
        if longest is None:
            return cls.lengths
        return (*(n for n in cls.lengths if n < longest), longest)

    @classmethod
    @abstractmethod
    def read(cls, values: dict[str, Any]) -> PretrainedConfig:
        """The config of a head from the values of its config.json. Raises ValueError naming what is not supported."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str | torch.device, allow_pickle: bool) -> PreTrainedModel:
        """Load the head of a folder. Raises ValueError naming what is wrong with it."""

    @classmethod
    @abstractmethod
    def aux_layers_of(cls, target: PretrainedConfig, draft: PretrainedConfig) -> tuple[int, ...]:
        """Layers of the target whose output the features are, counted from 1."""

    @classmethod
    def unfit(cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig) -> str | None:
        if not isinstance(draft, cls.configures):
            return f"it needs {cls.asks} as its draft"
        if config.method == "eqspec":
            return "method eqspec moves the KV, but not the features of the head"
        text = target.get_text_config()
        if (draft.vocab_size, draft.target_hidden_size) == (text.vocab_size, text.hidden_size):
            return None
        return (
            f"the head is for a vocabulary of {draft.vocab_size} and hidden states of {draft.target_hidden_size}, "
            f"but the target has {text.vocab_size} and {text.hidden_size}"
        )

    @classmethod
    def trial(cls, target: PreTrainedModel, config: EngineConfig) -> str | None:
        return spans_trial(target)

    @classmethod
    def memory(
        cls, target: PretrainedConfig, draft: PretrainedConfig | None, config: EngineConfig, dtype: torch.dtype
    ) -> MemoryPlan:
        assert isinstance(draft, cls.configures)
        features = len(set(cls.aux_layers_of(target, draft))) * draft.target_hidden_size
        plan = super().memory(target, draft, config, dtype) + states_memory(config, features, dtype)
        return plan + states_memory(config, len(cls.remembers) * draft.hidden_size, dtype, config.draft_window)

    @classmethod
    def build(cls, context: DrafterContext) -> Self:
        assert context.draft is not None
        head, target = cls.cached_draft(context, context.draft), context.verifier
        assert isinstance(head, PagedModel)
        assert isinstance(target, PagedModel)
        drafter = cls(context, context.draft, head)
        drafter.head, drafter.target = head, target
        drafter.aux_layers = cls.aux_layers_of(context.target.config, context.draft.config)
        head.last_position = target.last_position  # the head's own config has the limit of its training
        if cls.remembers:
            head.remember(cls.remembers)
        target.remember(drafter.aux_layers)
        return drafter

    def propose(self, group: Group, limits: list[int]) -> Draft:
        longest = self.longest(self.head.model.config)
        return super().propose(group, limits if longest is None else [min(limit, longest) for limit in limits])

    def _fill(self, batch: Batch) -> None:
        batch = batch.shifted(-1)
        self.head.fill(batch, features=self._features(batch))

    def _features(self, batch: Batch) -> Tensor:
        """The features [R, Q, D] at the batch's positions."""
        return self.target.recall(self.aux_layers, batch)


class HeadModel(PreTrainedModel):
    """The common base of heads, as models of transformers. A head without `embed_tokens` or `lm_head` uses the
    target's."""

    _supports_attention_backend = True
    _supports_sdpa = True

    def get_input_embeddings(self) -> Any:
        return getattr(self, "embed_tokens", None)

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> Any:
        return getattr(self, "lm_head", None)


def checked(configures: type[C], makes: type[PreTrainedModel], values: dict[str, Any]) -> C:
    """A head's config with these values. Raises ValueError if no head can be made with it."""
    try:
        config = configures(**values)
        config._attn_implementation = None  # it may name code on the hub
        with torch.device("meta"):
            makes(config)
    except StrictDataclassError as error:
        raise ValueError(f"config.json: {' '.join(str(error).split())}") from error
    except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"config.json: no head can be made with it ({type(error).__name__}: {error})") from error
    return config


def read_tensors(folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
    """The tensors of a folder's model.safetensors, or of its pytorch_model.bin if pickle is allowed.

    Raises ValueError naming the file.
    """
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.exists():
        try:
            return load_file(safe)
        except SafetensorError as error:
            raise ValueError(f"{safe}: not a safetensors file ({error})") from error
    if not pickled.exists():
        raise ValueError(f"{folder}: no weights; expected {safe.name} or {pickled.name}")
    if not allow_pickle:
        raise ValueError(f"{folder}: the weights are not safetensors; expected {safe.name}, or allow_pickle: true")
    tensors = read_pickled(pickled)
    if not (isinstance(tensors, dict) and all(isinstance(t, Tensor) for t in tensors.values())):
        raise ValueError(f"{pickled}: not a file of tensors; expected tensors by name")
    return tensors


def read_pickled(file: Path) -> Any:
    """What a pickled file holds: tensors, numbers and collections of them. Raises ValueError naming the file."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{file}: not a file of tensors ({' '.join(str(error).split()[:12])})") from error


def filled(
    head: M, tensors: dict[str, Tensor], folder: Path, asks: str, dtype: torch.dtype, device: str | torch.device
) -> M:
    """Load tensors into the head. Raises ValueError naming a tensor that is missing, unknown or of another shape."""
    expected = head.state_dict()
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(f"{folder}: no tensor {name}; expected one of {list(tensor.shape)}")
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{folder}: {name} is {list(tensors[name].shape)}, but its config.json asks for {list(tensor.shape)}"
            )
    if unknown := sorted(set(tensors) - set(expected)):
        raise ValueError(f"{folder}: {asks} has no tensor {unknown[0]}")
    head.load_state_dict(tensors)
    placed: Any = head
    placed.to(device=device, dtype=dtype).eval()
    placed.rotary_emb = LlamaRotaryEmbedding(placed.config).to(device)  # its factors are not weights, and stay float32
    return head


def check_proposed(d2t: Tensor, vocabulary: int, folder: Path) -> None:
    """Raises ValueError if a head can propose a token that the target lacks. d2t: token i of the head's own vocabulary
    is the target's token i + d2t[i]."""
    tokens = d2t + torch.arange(len(d2t), device=d2t.device)
    if not ((tokens >= 0) & (tokens < vocabulary)).all():
        raise ValueError(f"{folder}: d2t has tokens outside the vocabulary of {vocabulary} tokens")


def proposed(head: Any) -> Tensor:
    """The tokens that a head can propose, [V'], in the order of its own vocabulary."""
    tokens = torch.arange(head.config.draft_vocab_size, device=head.device)
    return tokens if head.d2t is None else tokens + head.d2t


def widened(logits: Tensor, d2t: Tensor | None, size: int) -> Tensor:
    """Logits [..., V] over the target's vocabulary of `size` tokens, from logits [..., V'] over the tokens that the
    head can propose. The target's other tokens have the lowest logit. d2t: may be None if the head can propose all."""
    if logits.shape[-1] == size:
        return logits
    assert d2t is not None
    wide = logits.new_full((*logits.shape[:-1], size), torch.finfo(logits.dtype).min)
    return wide.index_copy_(-1, torch.arange(len(d2t), device=logits.device) + d2t, logits)


LAYER = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters",
         "attention_bias", "mlp_bias", "layer_types", "initializer_range")  # fmt: skip


def write_speculators(
    folder: Path, kind: str, layers: str, head: PreTrainedModel, target: PreTrainedModel, drafts: int,
    values: dict[str, Any], dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write a head in the format of the library speculators.

    kind: of head. layers: model_type of its layers. drafts: K that it was trained for. values: its own settings.
    """
    config, own, wide = head.config, head.config.draft_vocab_size, head.config.target_hidden_size
    layer = {name: getattr(config, name) for name in LAYER if getattr(config, name, None) is not None}
    theta = (layer.get("rope_parameters") or {}).get("rope_theta")
    layer |= {"model_type": layers} | ({} if theta is None else {"rope_theta": theta})
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": target.config.name_or_path, "architectures": target.config.architectures or []}
    speculators = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }
    written = values | {
        "draft_vocab_size": own,
        "target_hidden_size": None if wide == config.hidden_size else wide,
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": speculators,
        "transformer_layer_config": layer,
        "dtype": str(dtype).removeprefix("torch."),
    }
    tensors = {name: t if name == "d2t" else t.to(dtype) for name, t in head.state_dict().items()}
    if own == config.vocab_size:
        tensors.pop("d2t", None)
    else:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][proposed(head).cpu()] = True
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    save_file(
        {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors"
    )
