"""Loading a target/draft pair, and refusing what the engine cannot decode exactly."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.drafters import drafter_class, head_of
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.kv.cached_model import GATHERED, PagedModel, context_length, kv_shape
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.layers import experts
from exspec.actors.engine.request import Completion

WHAT_WORKS = "a decoder-only model that holds keys and values of every token, such as Llama, Qwen, Mistral or GLM-4"
REFUSED_CODE = "expected a model that transformers itself knows, or trust_remote_code: true to run that code"

NEEDED = ("num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
WINDOWS = ("sliding_window", "attention_chunk_size")  # of a configuration and of modules, in tokens
FED, FIRST, NARROW = 12, 7, 4  # tokens of the check, those of its first part, and of its windows
BESIDE = ((4, 1), (4, 6), (2, 64))  # rows and columns of the forwards of a round without drafts, a verify, a fill
CHANGING = ("dynamic", "longrope")  # rotary factors that a forward chooses
WAITS = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "repeat_interleave", "unique",
    "_unique2", "unique_consecutive",
}  # fmt: skip


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
    """Load target and draft from hub ids or folders; `draft` may be a head for the target, which its config tells, or
    None.

    trust_remote_code: run Python code that comes with a model. allow_pickle: load weights that are no safetensors.

    Raises ModelError where the engine cannot serve the pair, naming the model, the reason and what would work. Warns
    where the draft is larger than the target.
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
    """A draft for the pair's target, whose name is `target`. Raises and warns as `load_pair` does."""
    model = pair.target
    given: Any = (model.dtype, model.device, revision)
    if head_config(config_of(name, revision), name, model.config) is not None:
        head = load_head(name, *given, allow_pickle=allow_pickle)
        _check_head(model.config, head.config, name)  # which its tensors have told more of
        return head
    tokenizer = load_part(AutoTokenizer, name, revision, trust_remote_code)
    check_vocabularies(pair.tokenizer, tokenizer, target, name)
    draft = load_model(name, *given, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    sizes = [m.num_parameters() for m in (model, draft)]
    if sizes[1] > sizes[0]:
        warnings.warn(
            f"the draft {name} ({sizes[1]:,} parameters) is larger than the target {target} ({sizes[0]:,}): "
            "speculation will cost more than it saves; were they given in the wrong order?",
            stacklevel=2,
        )
    return draft


def config_of(name: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a hub id or folder. Raises ModelError naming it."""
    try:
        return dict(PretrainedConfig.get_config_dict(name, revision=revision)[0])
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {_reason(error, {})}") from error


def head_config(found: dict[str, Any], name: str, target: PretrainedConfig) -> PretrainedConfig | None:
    """The config of a head for a target, of its config.json alone; None where that is a model's.

    Raises ModelError naming what is not supported, or why the head is for another target.
    """
    drafter = head_of(found)
    if drafter is None:
        return None
    try:
        config = drafter.read(found)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error
    _check_head(target, config, name)
    return config


def _check_head(target: PretrainedConfig, head: PretrainedConfig, name: str) -> None:
    if why := drafter_class(head.head_for).refusal(target, head, EngineConfig()):
        raise ModelError(f"{name}: {why}")


def load_head(
    name: str,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    *,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """The head under a hub id or in a folder. Raises ModelError naming what is wrong with it."""
    drafter = head_of(config_of(name, revision))
    if drafter is None:
        raise ModelError(f"{name}: its config.json is not that of a head")
    try:
        folder = Path(name if Path(name).is_dir() else snapshot_download(name, revision=revision))
        head = drafter.load(folder, dtype, device, allow_pickle)
        settle_positions(head)
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
) -> PreTrainedModel:
    """Load one model for the engine. Raises ModelError as `load_pair` does."""
    check_config(load_part(AutoConfig, name, revision, trust_remote_code), name)
    safe = None if allow_pickle else True
    model = load_part(AutoModelForCausalLM, name, revision, trust_remote_code, dtype=dtype, use_safetensors=safe)
    model = model.to(device).eval()
    settle_positions(model)
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
    """Refuse models that do not hold the keys and values of every token: encoder-decoders, and layers with a state, or
    with the keys and values of other layers. Whether the rest decodes exactly is for `check_forward` to find out."""
    if config.is_encoder_decoder:
        raise ModelError(f"{name}: an encoder-decoder model ({config.model_type}); expected {WHAT_WORKS}")
    text = config.get_text_config()
    try:
        missing = [key for key in NEEDED if not getattr(text, key, None)]
        if not missing:
            kv_shape(config)
    except RuntimeError as error:  # so does transformers tell that layers differ
        reason = f"the layers of {config.model_type} have different shapes ({_first_line(error)})"
        raise ModelError(f"{name}: {reason}; expected {WHAT_WORKS}") from error
    if missing:
        raise ModelError(f"{name}: the configuration of {config.model_type} has no {missing[0]}; expected {WHAT_WORKS}")
    others = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if others:
        kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        found = ", ".join(sorted(kinds) or sorted(layer.__name__ for layer in others))
        raise ModelError(
            f"{name}: the cache of {config.model_type} does not hold the keys and values of every token ({found}); "
            f"expected {WHAT_WORKS}"
        )


def limit_context(config: PretrainedConfig) -> None:
    """Shorten the context to where one set of rotary factors holds, for there are models with another set for longer
    sequences (longrope). Their `generate` computes all keys anew where a sequence grows past that point."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    points = [p["original_max_position_embeddings"] for p in nested or [parameters] if p.get("rope_type") == "longrope"]
    if points:
        text.max_position_embeddings = min(text.max_position_embeddings, *points)


def settle_positions(model: PreTrainedModel) -> None:
    """Limit the context, and keep the rotary factors that hold inside it: a forward would choose them by the longest of
    its rows, and on a GPU wait to know it."""
    limit_context(model.config)
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds if isinstance(kinds, dict) else {"": kinds}
        for layer in [name for name, kind in named.items() if kind in CHANGING]:
            prefix = f"{layer}_" if layer else ""
            getattr(module, f"{prefix}inv_freq").copy_(getattr(module, f"{prefix}original_inv_freq"))
            named = {**named, layer: "default"}
            module.rope_type = named if layer else "default"


@torch.inference_mode()
def check_forward(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose logits, computed as the engine does, are not those of its own forward.

    It finds what no configuration tells: positions counted from a mask, rotary factors chosen by the longest row,
    attention that does not take a window, forwards that wait for the device. A few tokens are fed: windows and chunks
    are narrowed to less than that, on modules that share the model's weights, and positions are given.

    Raises ModelError with what differed.
    """
    swayed = False
    try:
        swayed = settle_experts(model)
        reason = _beside_others(model) or _out_of_step(_narrowed(model))
    except (AttributeError, AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
    kind = model.config.model_type
    if reason:
        raise ModelError(
            f"{name}: {kind} does not decode the same by slots as on its own ({reason}); expected {WHAT_WORKS}"
        )
    if swayed:
        raise ModelError(
            f"{name}: in {str(model.dtype).removeprefix('torch.')} the logits of {kind} depend on the tokens beside "
            "them; expected float32, where the difference is as small as any rounding"
        )


def settle_experts(model: PreTrainedModel) -> bool:
    """Have a mixture's experts computed in the first way in which no token's bits depend on its neighbours. Returns
    whether, in half precision, there is no such way.

    In float32 the first way is taken untried: what differs there is as small as between any two shapes. A model none of
    whose modules is called after experts has no mixture.
    """
    if not any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules()):
        return False
    for way in experts.ways(model.device):
        if way is not None:
            model.set_experts_implementation(way)
        if model.dtype == torch.float32 or not _swayed(model):
            return False
    return True


@torch.inference_mode()
def _swayed(model: PreTrainedModel) -> bool:
    """Whether the logits of a row's tokens differ by a bit with the rows beside it: rows like it, or any others."""
    size: int = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    for rows, columns in BESIDE:
        columns = min(columns, context_length(model.config))
        tokens = torch.randint(size, (1, columns), generator=generator)
        others = [torch.randint(size, (rows - 1, columns), generator=generator) for _ in range(3)]
        found = []
        for beside in (tokens.expand(rows - 1, -1), *others):
            ids = torch.cat([tokens, beside]).to(model.device)
            found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0])
        if not all(logits.equal(found[0]) for logits in found):
            return True
    return False


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _narrowed(model: PreTrainedModel) -> PreTrainedModel:
    """The model with windows and chunks of attention of so few tokens that the check's leave them."""
    if not any(getattr(model.config.get_text_config(), key, None) for key in WINDOWS):
        return model
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    for owner in (made.config, made.config.get_text_config(), *made.modules()):
        for key in WINDOWS:
            if isinstance(width := getattr(owner, key, None), int) and not isinstance(width, bool) and width > NARROW:
                setattr(owner, key, NARROW)
    return made


def _tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Two rows [2, count] of tokens that differ everywhere."""
    ids = torch.arange(1, count + 1, device=model.device)
    size: int = model.config.get_text_config().vocab_size
    return torch.stack([ids, ids + count]) % size


def _beside_others(model: PreTrainedModel) -> str | None:
    """Why a row at the beginning of the context is not the same beside one at its end."""
    tokens = _tokens(model, FED)
    near = torch.arange(FED, device=model.device)
    far = near + max(context_length(model.config) - FED, 0)

    def logits(rows: Tensor, positions: list[Tensor]) -> Tensor:
        mask = torch.ones_like(rows)
        output = model(input_ids=rows, attention_mask=mask, position_ids=torch.stack(positions))
        return output.logits  # type: ignore[no-any-return]

    together, back = logits(tokens, [near, far]), logits(tokens.flip(0), [far, near])
    for place, row, positions in ((0, 0, near), (1, 1, far)):
        alone = logits(tokens[row : row + 1], [positions])[0]
        if not (_same(together[place], alone) and _same(back[1 - place], alone)):
            return "a row's logits depend on the positions of the rows beside it"
    return None


def _out_of_step(model: PreTrainedModel) -> str | None:
    """Why a row in two parts, beside another sequence in another place, is not what the model itself makes of it."""
    tokens = _tokens(model, FED)
    expected = _generated(model, tokens[:1])
    pages = Pages(2, pages=2 * FED, size=NARROW - 1, chunk=NARROW - 1, longest=3 * FED, device=model.device)
    for slot in (0, 1):
        pages.begin(slot, [], 0, 2 * FED)
    cached = PagedModel(model, pages, GATHERED)
    slots = torch.tensor([1, 0], device=model.device)
    # The second row is there to be mistaken for the first.
    cached.forward(slots, tokens[:, :FIRST], torch.tensor([0, 0], device=model.device), attended=FED)
    second = torch.stack([tokens[0, FIRST:], tokens[1, : FED - FIRST]])
    starts = torch.tensor([FIRST, 1], device=model.device)
    with Waits() as waits:
        logits = cached.forward(slots, second, starts, attended=2 * FED)[0]
    if waits.found and model.device.type == "cuda":
        return f"its forward waits for the device: {waits.found[0]}"
    return None if _same(logits, expected) else "its logits differ"


def _generated(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [FED - FIRST, V] behind the first part of a row [1, FED], as `generate` comes by them: the first part as a
    prompt, the others one by one with a cache of transformers."""
    output = model(input_ids=tokens[:, :FIRST], use_cache=True)
    found = []
    for place in range(FIRST, FED):
        output = model(input_ids=tokens[:, place : place + 1], past_key_values=output.past_key_values, use_cache=True)
        found.append(output.logits[0, -1])
    return torch.stack(found)


def _same(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits [Q, V] are equal but for rounding; NaN is not.

    In half precision the columns in the middle count: rounding may hand single tokens to other experts, and what is
    wrong with a model is wrong in all columns.
    """
    off = (logits.float() - expected.float()).abs().amax(-1) / expected.float().abs().max()  # [Q]
    half = logits.dtype in (torch.bfloat16, torch.float16)
    return bool(off.median() <= 0.1 if half else off.max() <= 1e-3)


class Waits(TorchDispatchMode):
    """Notes operations whose result Python would have to wait for, or whose shape depends on values: no CUDA graph can
    hold them. found: their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        chosen = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITS or chosen:
            self.found.append(f"{name} by a mask" if chosen else name)
        return function(*args, **(kwargs or {}))


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

    For `Request.stop`: a call makes a check, which takes the completion's tokens one by one and returns the string that
    the text now contains, or None. `cut` gives the text before it. least: tokens before which no string counts that is
    complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], least: int = 0) -> None:
        if not strings or not all(strings):
            raise ValueError("stop: expected one or more strings, none of them empty")
        self.tokenizer, self.strings, self.least = tokenizer, tuple(strings), least
        # A token adds a byte of text at least, special ones aside, and a character has four bytes at most.
        self.tail = 4 * max(map(len, strings)) + 8

    def __call__(self) -> "StopMatcher":
        return StopMatcher(self)

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of the tokens up to the stop string, or all of it where there is none."""
        found = self.found(tokens)
        return self.text(tokens)[: found[0] if found else None]

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def found(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Place and text of the string that begins first; of those that begin together, the longest."""
        text, before = self.text(tokens), len(self.text(tokens[: max(self.least - 1, 0)]))
        places = [(text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self.strings]
        first = min((place for place in places if place[0] >= 0), default=None)
        return (first[0], first[2]) if first else None


class StopMatcher:
    """Looks for stop strings in one completion. Keeps the end of its text, so that most tokens need no decoding."""

    def __init__(self, stop: StopStrings) -> None:
        self.stop = stop
        self.pieces = _pieces(stop.tokenizer)
        # Clean-up takes spaces out of what is written, so without spaces a string that is there is never missed.
        self.drops = " " if self.pieces.cleaned else ""
        self.strings = [s.replace(self.drops, "") if self.drops else s for s in stop.strings]
        # What clean-up takes out may lie in the middle of a string whose end was there before.
        self.lasts = frozenset(s[-1] for s in stop.strings) if not self.drops else None
        longest = max(map(len, stop.strings))
        self.kept = 2 * longest + CLEANED if self.drops else longest - 1
        self.doubtful = any(UNKNOWN in s for s in stop.strings)  # it is also what an unfinished character looks like
        self.tokens: list[int] = []  # all, and those that are not special
        self.written: list[int] = []
        self.end = ""  # the last characters of the text, or more; empty where they are to be decoded

    def __call__(self, token: int) -> str | None:
        self.tokens.append(token)
        piece = self.pieces[token]
        if token in self.pieces.special:
            return self._decoded() if piece else None
        self.written.append(token)
        if piece is None or not self.end or self.doubtful:
            return self._decoded()
        text = self.end + piece
        self.end = text[-self.kept :] if self.kept else piece
        if self.lasts is not None and self.lasts.isdisjoint(piece):
            return None
        text = text.replace(self.drops, "") if self.drops else text
        return self._decoded() if any(s in text for s in self.strings) else None

    def _decoded(self) -> str | None:
        """What the text itself says."""
        self.end = self.stop.text(self.written[-self.stop.tail :])
        if not any(s in self.end for s in self.stop.strings):
            return None
        # The tail may begin inside a character, and its first word without its space: the whole text decides.
        found = self.stop.found(self.tokens)
        return found[1] if found else None


UNKNOWN = "\ufffd"  # what bytes that are no whole character are decoded as
CLEANED = 8  # characters of the longest piece of text that clean-up looks at, and some more


class Pieces(dict[int, str | None]):
    """What each token adds to a text that it does not begin; None where that depends on the tokens before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.special = tokenizer, frozenset(tokenizer.all_special_ids)
        self.cleaned = bool(tokenizer.clean_up_tokenization_spaces)

    def __missing__(self, token: int) -> str | None:
        once, twice = (str(self.tokenizer.decode([token] * n, skip_special_tokens=True)) for n in (1, 2))
        whole = twice.startswith(once) and UNKNOWN not in twice
        self[token] = piece = twice[len(once) :] if whole else None
        return piece


@lru_cache(maxsize=8)
def _pieces(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    return Pieces(tokenizer)


def completion_text(tokenizer: PreTrainedTokenizerBase, completion: Completion, stop: StopStrings | None) -> str:
    """The text of a completion: without its end token, and cut before the stop string that ended it."""
    if stop is not None and isinstance(completion.stopped_by, str):
        return stop.cut(completion.tokens)
    tokens = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
