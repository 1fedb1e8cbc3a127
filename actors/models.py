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
from exspec.actors.engine.drafters.lookup import drafter_class, head_of
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.exactness import ModelError, check_config, check_forward, fix_rotary_factors

REFUSED_CODE = "expected a model that transformers itself knows, or trust_remote_code: true to run that code"


@dataclass(frozen=True)
class Pair:
    """A target and its draft, on one device in one dtype, and the tokenizer of both."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase


def load_pair(
    target: str,
    draft: str | None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    draft_revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Pair:
    """Load target and draft from hub ids or folders. The draft may also be a head for the target: its config.json shows
    which. None loads no draft.

    trust_remote_code: run Python code that comes with a model. allow_pickle: load weights that are not safetensors.

    Raises ModelError if the engine cannot serve the pair, naming the model, the reason and what would work. Warns if
    the draft is larger than the target.
    """
    may = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    tokenizer = load_part(AutoTokenizer, target, revision, trust_remote_code)
    pair = Pair(load_model(target, dtype, device, revision, **may), None, tokenizer)
    return pair if draft is None else replace(pair, draft=load_draft(pair, draft, target, draft_revision, **may))


def load_draft(
    pair: Pair,
    name: str,
    target: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """Load a draft for the pair's target, whose name is `target`. Raises and warns as `load_pair` does."""
    model = pair.target
    where: Any = (model.dtype, model.device, revision)
    if head_config(config_of(name, revision), name, model.config) is not None:
        head = load_head(name, *where, allow_pickle=allow_pickle)
        _check_head(model.config, head.config, name)  # checked again: its tensors have completed the config
        return head
    tokenizer = load_part(AutoTokenizer, name, revision, trust_remote_code)
    check_vocabularies(pair.tokenizer, tokenizer, target, name)
    draft = load_model(name, *where, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle, bits=False)
    sizes = [m.num_parameters() for m in (model, draft)]
    if sizes[1] > sizes[0]:
        warnings.warn(
            f"the draft {name} ({sizes[1]:,} parameters) is larger than the target {target} ({sizes[0]:,}): "
            "speculation will cost more than it saves; are target and draft swapped?",
            stacklevel=2,
        )
    return draft


def config_of(name: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a hub id or folder. Raises ModelError naming the hub id or folder."""
    try:
        return dict(PretrainedConfig.get_config_dict(name, revision=revision)[0])
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {_reason(error, {})}") from error


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
    _check_head(target, config, name)
    return config


def _check_head(target: PretrainedConfig, head: PretrainedConfig, name: str) -> None:
    if reason := drafter_class(head.head_for).refusal(target, head, EngineConfig()):
        raise ModelError(f"{name}: {reason}")


def load_head(
    name: str,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    *,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """Load the head of a hub id or folder. Raises ModelError naming what is wrong with it."""
    drafter = head_of(config_of(name, revision))
    if drafter is None:
        raise ModelError(f"{name}: config.json does not describe a head")
    try:
        folder = Path(name if Path(name).is_dir() else snapshot_download(name, revision=revision))
        head = drafter.load(folder, dtype, device, allow_pickle)
        fix_rotary_factors(head)
        return head
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from error


def load_model(
    name: str,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    bits: bool = True,
) -> PreTrainedModel:
    """Load one model for the engine. bits: see `check_forward`. Raises ModelError as `load_pair` does."""
    check_config(load_part(AutoConfig, name, revision, trust_remote_code), name)
    safe = None if allow_pickle else True
    model = load_part(AutoModelForCausalLM, name, revision, trust_remote_code, dtype=dtype, use_safetensors=safe)
    model = model.to(device).eval()
    fix_rotary_factors(model)
    check_forward(model, name, bits)
    return model  # type: ignore[no-any-return]


def forget_sampling(model: PreTrainedModel) -> None:
    """Reduce a model's generation config to its end tokens. transformers' `generate` otherwise takes sampling and
    penalties from it wherever the caller sets none."""
    model.generation_config = GenerationConfig(eos_token_id=sorted(model_end_ids(model)) or None)


def load_part(loader: Any, name: str, revision: str | None, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load a hub id or folder with one of transformers' Auto classes. Raises ModelError naming the hub id or folder.

    Without trust_remote_code, a model that needs its own code is rejected without a question on the terminal.
    """
    try:
        return loader.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {_reason(error, options)}") from error


def _reason(error: Exception, options: dict[str, Any]) -> str:
    """Why transformers cannot load a model, and the setting that would allow it."""
    if "trust_remote_code" in str(error):
        return f"it comes with code of its own; {REFUSED_CODE}"
    reason = f"cannot be loaded as a model folder or hub id: {str(error).strip().splitlines()[0]}"
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
