"""Loading a target/draft pair, and refusing what the engine cannot decode exactly."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer

from exspec.actors.engine.cached_model import SlotModel
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.request import Completion

WHAT_WORKS = (
    "a decoder-only model with plain full attention in every layer, such as Llama, Qwen2, Qwen3, Mistral or GLM-4"
)
REFUSED_CODE = "expected a model that transformers itself knows, or trust_remote_code: true to run that code"


class ModelError(ValueError):
    """A model or pair that cannot be used; the message says why and what would work."""


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
    """Load target and draft from hub ids or folders; `draft` may be None for plain decoding.

    trust_remote_code: run Python code that comes with a model. allow_pickle: load weights that are no safetensors.

    Raises ModelError where the engine cannot serve the pair, naming the model, the reason and what would work. Warns
    where the draft is larger than the target.
    """
    may = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    tokenizer = load_part(AutoTokenizer, target, revision, trust_remote_code)
    target_model = load_model(target, dtype, device, revision, **may)
    if draft is None:
        return Pair(target_model, None, tokenizer)
    draft_tokenizer = load_part(AutoTokenizer, draft, draft_revision, trust_remote_code)
    check_vocabularies(tokenizer, draft_tokenizer, target, draft)
    draft_model = load_model(draft, dtype, device, draft_revision, **may)
    sizes = [model.num_parameters() for model in (target_model, draft_model)]
    if sizes[1] > sizes[0]:
        warnings.warn(
            f"the draft {draft} ({sizes[1]:,} parameters) is larger than the target {target} ({sizes[0]:,}): "
            "speculation will cost more than it saves; were they given in the wrong order?",
            stacklevel=2,
        )
    return Pair(target_model, draft_model, tokenizer)


def load_model(
    name: str,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """Load one model for the engine. Raises ModelError as `load_pair` does."""
    check_config(load_part(AutoConfig, name, revision, trust_remote_code), name)
    safe = None if allow_pickle else True
    model = load_part(AutoModelForCausalLM, name, revision, trust_remote_code, dtype=dtype, use_safetensors=safe)
    model = model.to(device).eval()
    check_forward(model, name)
    return model  # type: ignore[no-any-return]


def forget_sampling(model: PreTrainedModel) -> None:
    """Leave the end tokens alone of a model's generation config: `generate` of transformers takes from it all that its
    caller does not say, sampling and penalties too."""
    model.generation_config = GenerationConfig(eos_token_id=sorted(model_end_ids(model)) or None)


def load_part(loader: Any, name: str, revision: str | None, trust_remote_code: bool = False, **options: Any) -> Any:
    """What one of transformers' Auto classes finds under a hub id or folder. Raises ModelError naming it.

    Without trust_remote_code a model that needs code of its own is refused, and nothing asks on the terminal.
    """
    try:
        return loader.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {_reason(error, options)}") from error


def _reason(error: Exception, options: dict[str, Any]) -> str:
    """Why transformers cannot load a model, with the setting that would let it."""
    if "trust_remote_code" in str(error):
        return f"it comes with code of its own; {REFUSED_CODE}"
    reason = f"cannot be loaded as a model folder or hub id: {str(error).strip().splitlines()[0]}"
    if options.get("use_safetensors") and "safetensors" in str(error):
        return f"{reason}; expected safetensors, or allow_pickle: true for weights in files that can run code"
    return reason


def check_config(config: PretrainedConfig, name: str) -> None:
    """Refuse encoder-decoder models and models whose cache is not plain full attention."""
    if config.is_encoder_decoder:
        raise ModelError(f"{name}: an encoder-decoder model ({config.model_type}); expected {WHAT_WORKS}")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    layers = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer}
    if kinds or layers or not getattr(text, "num_attention_heads", None):
        found = ", ".join(sorted(kinds) or sorted(t.__name__ for t in layers) or ["no attention heads"])
        raise ModelError(
            f"{name}: the cache of {config.model_type} is not plain full attention ({found}); expected {WHAT_WORKS}"
        )


@torch.inference_mode()
def check_forward(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that does not take positions, mask and cache as given: run a prompt through slots, out of step,
    and compare with the model on its own. Finds what no configuration tells, such as positions counted from a mask."""
    device = model.device
    tokens = (torch.arange(1, 7, device=device) % model.config.get_text_config().vocab_size)[None]
    refusal = (
        f"{name}: {model.config.model_type} does not decode the same by slots as on its own; expected {WHAT_WORKS}"
    )
    try:
        expected = model(input_ids=tokens).logits[0, -1]
        cached = SlotModel(model, slots=2, columns=16)
        slots = torch.tensor([1, 0], device=device)
        # The second row is another sequence in another place, there to be mistaken for the first.
        first = torch.cat([tokens[:, :4], tokens[:, :4].flip(1)])
        cached.forward(slots, first, torch.tensor([0, 0], device=device), attended=8)
        second = torch.cat([tokens[:, 3:], tokens[:, :3]])
        logits = cached.forward(slots, second, torch.tensor([3, 1], device=device), attended=16)[0, -1]
    except (AttributeError, TypeError, IndexError, RuntimeError) as error:
        raise ModelError(f"{refusal} ({type(error).__name__}: {error})") from error
    scale = expected.float().abs().max()
    tolerance = 0.1 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not (logits.float() - expected.float()).abs().max() <= tolerance * scale:
        raise ModelError(refusal)


def check_vocabularies(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """Refuse two tokenizers that give an id different meanings, naming the first such id."""
    names = [{index: token for token, index in t.get_vocab().items()} for t in (target, draft)]
    for index in sorted(names[0] | names[1]):
        ours, theirs = (vocabulary.get(index) for vocabulary in names)
        if ours != theirs:
            raise ModelError(
                f"{target_name} and {draft_name} have different vocabularies: token {index} is {ours!r} in the target "
                f"and {theirs!r} in the draft; expected a draft of the same family, trained with the target's tokenizer"
            )


class StopStrings:
    """Ends a completion at the first of some strings, wherever the tokens' borders lie.

    A check for `Request.stop`: called with the completion's tokens after each of them, it returns the string that the
    text now contains, or None. `cut` gives the text before it. least: tokens before which no string counts that is
    complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], least: int = 0) -> None:
        if not strings or not all(strings):
            raise ValueError("stop: expected one or more strings, none of them empty")
        self.tokenizer, self.strings, self.least = tokenizer, tuple(strings), least
        # A token adds a byte of text at least, special ones aside, and a character has four bytes at most.
        self.special = frozenset(tokenizer.all_special_ids)
        self.tail = 4 * max(map(len, strings)) + 8

    def __call__(self, tokens: Sequence[int]) -> str | None:
        seen = [t for t in tokens if t not in self.special]
        if not any(s in self._text(seen[-self.tail :]) for s in self.strings):
            return None
        # The tail may begin inside a character, and its first word without its space: the whole text decides.
        found = self._found(tokens)
        return found[1] if found else None

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of the tokens up to the stop string, or all of it where there is none."""
        found = self._found(tokens)
        return self._text(tokens)[: found[0] if found else None]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _found(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Place and text of the string that begins first; of those that begin together, the longest."""
        text, before = self._text(tokens), len(self._text(tokens[: max(self.least - 1, 0)]))
        places = [(text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self.strings]
        first = min((place for place in places if place[0] >= 0), default=None)
        return (first[0], first[2]) if first else None


def completion_text(tokenizer: PreTrainedTokenizerBase, completion: Completion, stop: StopStrings | None) -> str:
    """The text of a completion: without its end token, and cut before the stop string that ended it."""
    if stop is not None and isinstance(completion.stopped_by, str):
        return stop.cut(completion.tokens)
    tokens = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
