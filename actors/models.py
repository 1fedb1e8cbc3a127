"""Loading a target/draft pair."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.head import HeadDrafter
from exspec.actors.engine.drafters.lookup import head_of
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.kv.attention import first_line
from exspec.actors.exactness import ModelError, check_config, check_forward, fix_rotary_factors

REFUSED_CODE = "expected a model that transformers itself knows, or trust_remote_code: true to run that code"


@dataclass(frozen=True)
class Source:
    """A model by hub id or folder.

    trust_remote_code: run Python code that comes with it. allow_pickle: load weights that are not safetensors.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False


@dataclass(frozen=True)
class Pair:
    """A target and its draft, on one device in one dtype, and the tokenizer of both."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase


def load_pair(
    target: Source | str,
    draft: Source | str | None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Pair:
    """Load target and draft. The draft may also be a head for the target, which its config.json shows.

    Raises ModelError if the engine cannot serve the pair, naming the model, the reason and what would work. Warns if
    the draft is larger than the target.
    """
    source = Source(target) if isinstance(target, str) else target
    tokenizer = load_part(AutoTokenizer, source)
    pair = Pair(load_model(source, dtype, device), None, tokenizer)
    return pair if draft is None else replace(pair, draft=load_draft(pair, draft, source.name))


def load_draft(pair: Pair, draft: Source | str, target: str) -> PreTrainedModel:
    """Load a draft for the pair's target, whose name is `target`. Raises and warns as `load_pair` does."""
    source, model = Source(draft) if isinstance(draft, str) else draft, pair.target
    values = config_of(source)
    if (drafter := head_of(values)) is not None:
        head_config(values, source.name, model.config)
        return _load_head(drafter, source, model)
    tokenizer = load_part(AutoTokenizer, source)
    check_vocabularies(pair.tokenizer, tokenizer, target, source.name)
    loaded = load_model(source, model.dtype, model.device, bits=False)
    sizes = [m.num_parameters() for m in (model, loaded)]
    if sizes[1] > sizes[0]:
        warnings.warn(
            f"the draft {source.name} ({sizes[1]:,} parameters) is larger than the target {target} ({sizes[0]:,}): "
            "speculation will cost more than it saves; are target and draft swapped?",
            stacklevel=2,
        )
    return loaded


def config_of(source: Source) -> dict[str, Any]:
    """The config.json of a model or head. Raises ModelError naming it."""
    try:
        return dict(PretrainedConfig.get_config_dict(source.name, revision=source.revision)[0])
    except (OSError, ValueError) as error:
        raise ModelError(f"{source.name}: {_reason(error, {})}") from error


def head_config(values: dict[str, Any], name: str, target: PretrainedConfig) -> PretrainedConfig | None:
    """The config of a head for a target, read from the values of its config.json; None if they describe a model.

    Raises ModelError naming what is not supported, or why the head does not fit the target.
    """
    drafter = head_of(values)
    if drafter is None:
        return None
    try:
        config = drafter.read(values)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error
    _check_head(drafter, target, config, name)
    return config


def _check_head(drafter: type[HeadDrafter], target: PretrainedConfig, head: PretrainedConfig, name: str) -> None:
    if reason := drafter.refusal(target, head, EngineConfig()):
        raise ModelError(f"{name}: {reason}")


def _load_head(drafter: type[HeadDrafter], source: Source, target: PreTrainedModel) -> PreTrainedModel:
    local = Path(source.name).is_dir()
    try:
        folder = source.name if local else snapshot_download(source.name, revision=source.revision)
        head = drafter.load(Path(folder), target.dtype, target.device, source.allow_pickle)
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from error
    _check_head(drafter, target.config, head.config, source.name)  # again: its tensors have completed the config
    fix_rotary_factors(head)
    return head


def load_model(
    source: Source, dtype: torch.dtype, device: str | torch.device = "cpu", *, bits: bool = True
) -> PreTrainedModel:
    """Load one model for the engine. bits: see `check_forward`. Raises ModelError as `load_pair` does."""
    check_config(load_part(AutoConfig, source), source.name)
    safe = None if source.allow_pickle else True
    model = load_part(AutoModelForCausalLM, source, dtype=dtype, use_safetensors=safe).to(device).eval()
    fix_rotary_factors(model)
    check_forward(model, source.name, bits)
    return model  # type: ignore[no-any-return]


def forget_sampling(model: PreTrainedModel) -> None:
    """Reduce a model's generation config to its end tokens. transformers' `generate` otherwise takes sampling and
    penalties from it wherever the caller sets none."""
    model.generation_config = GenerationConfig(eos_token_id=sorted(model_end_ids(model)) or None)


def load_part(loader: Any, source: Source, **options: Any) -> Any:
    """Load a hub id or folder with one of transformers' Auto classes. Raises ModelError naming the hub id or folder.

    Without trust_remote_code, a model that needs its own code is rejected without a question on the terminal.
    """
    try:
        return loader.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code, **options
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{source.name}: {_reason(error, options)}") from error


def _reason(error: Exception, options: dict[str, Any]) -> str:
    if "trust_remote_code" in str(error):
        return f"it comes with code of its own; {REFUSED_CODE}"
    reason = f"cannot be loaded as a model folder or hub id: {first_line(error)}"
    if options.get("use_safetensors") and "safetensors" in str(error):
        return f"{reason}; expected safetensors, or allow_pickle: true for weights in files that can run code"
    return reason


def check_vocabularies(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """Raise ModelError if an id means different tokens in two tokenizers, naming the first such id."""
    names = [{index: token for token, index in t.get_vocab().items()} for t in (target, draft)]
    for index in sorted(names[0] | names[1]):
        ours, theirs = (vocabulary.get(index) for vocabulary in names)
        if ours != theirs:
            raise ModelError(
                f"{target_name} and {draft_name} have different vocabularies: token {index} is {ours!r} in the target "
                f"and {theirs!r} in the draft; expected a draft of the same family, trained with the target's tokenizer"
            )
