"""Loading a target/draft pair."""

import json
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from exspec.actors.adapter import adapt, merge
from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters.head import HeadDrafter
from exspec.actors.engine.drafters.lookup import head_of
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.faults import first_line
from exspec.actors.engine.kv.memory import ADAPTERS, LOADED
from exspec.actors.engine.kv.split import Split, place
from exspec.actors.engine.layers.headless import headless
from exspec.actors.engine.layers.packed import is_quantized
from exspec.actors.engine.shape.plan import balanced
from exspec.actors.exactness import check_config, check_forward, fix_rotary_factors
from exspec.actors.source import PICKLED, ModelError, Source, check_name, failure, load_part

INDEX = "model.safetensors.index.json"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")  # ends of names


@dataclass(frozen=True)
class Devices:
    """Several devices for a target's layers. draft: of the draft model that the first one has, if there is one.
    capacity: tokens of the longest row."""

    devices: tuple[torch.device, ...]
    draft: PretrainedConfig | None
    capacity: int


@dataclass(frozen=True)
class Pair:
    """A target and its draft in one dtype, and the tokenizer of both. The draft is on the target's first device."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase


def load_pair(
    target: Source | str,
    draft: Source | str | None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | Devices = "cpu",
) -> Pair:
    """Load target and draft. The draft may also be a head for the target, which its config.json shows. device: of
    both, or the devices that the target's layers are split over.

    Raises ModelError if the engine cannot serve the pair, naming the model, the reason and what would work. Warns if
    the draft is larger than the target.
    """
    source = Source(target) if isinstance(target, str) else target
    config_of(source)  # for a model that is not there, its error is clearer than the tokenizer's
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
    check_name(source.name)
    try:
        values = PretrainedConfig.get_config_dict(source.name, revision=source.revision)[0]
    except Exception as error:  # as in load_part
        raise ModelError(f"{source.name}: {failure(error, AutoConfig, {})}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{source.name}: config.json is a {type(values).__name__}; expected a JSON object")
    return values


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
    source: Source, dtype: torch.dtype, device: str | torch.device | Devices = "cpu", *, bits: bool = True
) -> PreTrainedModel:
    """Load one model for the engine. bits: see `check_forward`. Raises ModelError as `load_pair` does."""
    config = load_part(AutoConfig, source)
    check_config(config, source.name)
    check_names(source, config)
    options = {"dtype": dtype, "use_safetensors": None if source.allow_pickle else True, "output_loading_info": True}
    model, found = load_part(AutoModelForCausalLM if source.head else AutoModel, source, config=config, **options)
    if missing := sorted(found["missing_keys"]):  # transformers would make them random
        raise ModelError(
            f"{source.name}: its files lack {missing[0]} and {len(missing) - 1} more tensors of its config.json; "
            "copy the model again"
        )
    model = _split(model, device, source.name) if isinstance(device, Devices) else model.to(device)
    model = model.eval() if source.head else headless(model).eval()
    if source.adapter:
        merge(model, source.adapter)
    fix_rotary_factors(model)
    check_forward(model, source.name, bits)
    if is_quantized(config):  # the first forward may have unpacked its weights
        setattr(model.config, LOADED, _held(model))
    if source.adapters:
        before = _held(model)
        adapt(model, source.adapters)
        setattr(model.config, ADAPTERS, _held(model) - before)
    return model  # type: ignore[no-any-return]


def _split(model: PreTrainedModel, on: Devices, name: str) -> PreTrainedModel:
    try:
        layers = balanced(model.config, on.draft, len(on.devices), model.dtype, on.capacity)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error
    place(model, Split(on.devices, layers))
    return model


def _held(model: PreTrainedModel) -> int:
    """Bytes of a model's tensors."""
    return sum(map(_bytes, {id(t): t for t in (*model.parameters(), *model.buffers())}.values()))


def _bytes(tensor: Tensor) -> int:
    """What a tensor holds. The parts of a quantized one are tensors of their own."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def forget_sampling(model: PreTrainedModel) -> None:
    """Reduce a model's generation config to its end tokens. transformers' `generate` otherwise takes sampling and
    penalties from it wherever the caller sets none."""
    model.generation_config = GenerationConfig(eos_token_id=sorted(model_end_ids(model)) or None)


def check_names(source: Source, config: PretrainedConfig) -> None:
    """Reject weights in files that are not safetensors, unless allow_pickle is set, and files outside the folder.

    transformers only checks the name of the index, and loads pickle if the index names it. Raises ModelError.
    """
    for part in (config, config.get_text_config()):
        first = str(getattr(part, "transformers_weights", None) or INDEX)
        for name in (first, *_index(source, first)):
            place = f"{source.name}: {'config.json' if name is first else first} names the file {name!r}"
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]*[^/\\\0.]", name):
                raise ModelError(f"{place}; expected a file of the same folder")
            kinds = (".safetensors", ".safetensors.index.json") if name is first else (".safetensors",)
            if not (source.allow_pickle or name.endswith(kinds)):
                raise ModelError(f"{place}; {PICKLED}")


def _index(source: Source, name: str) -> list[Any]:
    """The files that an index of weights names; none if this is no index, or if there is none."""
    if "/" in name or not name.endswith(".index.json"):
        return []
    silent = dict.fromkeys(("missing_entries", "connection_errors", "gated_repo"), False)
    options = {f"_raise_exceptions_for_{what}": value for what, value in silent.items()}
    path = cached_file(source.name, name, revision=source.revision, **options)
    if path is None:
        return []
    try:
        index = json.loads(Path(path).read_text(encoding="utf-8"))
        return list(dict.fromkeys(index["weight_map"].values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: not an index of weights ({type(error).__name__}: {first_line(error)})") from error


def check_folder(source: Source, config: PretrainedConfig) -> None:
    """Reject a local folder whose weights are missing or cut, or do not fit its vocab_size. Reads headers only.

    Raises ModelError naming the file.
    """
    folder, size = Path(source.name), getattr(config.get_text_config(), "vocab_size", None)
    files = sorted(folder.glob("*.safetensors"))
    if not files and not source.allow_pickle:
        raise ModelError(f"{folder}: the folder has no weights in safetensors; {PICKLED}")
    if gone := [name for name in _index(source, INDEX) if not (folder / name).is_file()]:
        raise ModelError(f"{folder}: {gone[0]} is missing, which {INDEX} names; copy the model again")
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                rows = {n: tensors.get_slice(n).get_shape()[0] for n in tensors.keys() if n.endswith(EMBEDDINGS)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cut or damaged ({first_line(error)}); copy the model again") from error
        if other := [name for name, count in rows.items() if size and count != size]:
            raise ModelError(
                f"{folder}: vocab_size is {size} in config.json, but {other[0]} in {file.name} has "
                f"{rows[other[0]]} rows; copy the model again"
            )


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
