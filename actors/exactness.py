"""Refusing what the engine cannot decode exactly."""

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import GATHERED, PagedModel, context_length, kv_shape
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.layers import experts

WHAT_WORKS = "a decoder-only model that holds keys and values of every token, such as Llama, Qwen, Mistral or GLM-4"
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


def fix_rotary_factors(model: PreTrainedModel) -> None:
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
def check_forward(model: PreTrainedModel, name: str, bits: bool = True) -> None:
    """Refuse a model whose logits, computed as the engine does, are not those of its own forward.

    It finds what no configuration tells: positions counted from a mask, rotary factors chosen by the longest row,
    attention that does not take a window, forwards that wait for the device. A few tokens are fed: windows and chunks
    are narrowed to less than that, on modules that share the model's weights, and positions are given.

    bits: whether no bit of a token may depend on its neighbours; those of drafts may, for they decide no token. Raises
    ModelError with what differed.
    """
    swayed = False
    try:
        swayed = bits and choose_experts(model)
        reason = _beside_others(model) or _out_of_step(_narrowed(model))
    except torch.OutOfMemoryError:
        raise
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


def choose_experts(model: PreTrainedModel) -> bool:
    """Have a mixture's experts computed in the first way in which no token's bits depend on its neighbours. Returns
    whether, in half precision, there is no such way.

    In float32 the first way is taken untried: what differs there is as small as between any two shapes. A model none of
    whose modules is called after experts has no mixture.
    """
    if not any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules()):
        return False
    for number, way in enumerate(experts.ways(model.device)):
        if way is not None:
            model.set_experts_implementation(way)
        try:
            if model.dtype == torch.float32 or not _swayed(model):
                return False
        except torch.OutOfMemoryError:
            if number == 0:
                raise
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
    cached.forward(Batch(slots, tokens[:, :FIRST], torch.zeros_like(slots), FED))
    second = torch.stack([tokens[0, FIRST:], tokens[1, : FED - FIRST]])
    starts = torch.tensor([FIRST, 1], device=model.device)
    with Waits() as waits:
        logits = cached.forward(Batch(slots, second, starts, 2 * FED))[0]
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


def transformers_generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Collection[int],
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Greedy completions by transformers' `generate`, the reference that the engine's tokens are compared with.

    The prompts are one batch, padded on the left. A completion ends with its first end token. settings: of the
    GenerationConfig. options: of `generate` itself.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(end_ids) or None,
        pad_token_id=min(end_ids, default=0),
        **settings or {},
    )
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)  # type: ignore[operator]
    return [_until_end(row, end_ids) for row in output[:, width:].tolist()]


def _until_end(tokens: list[int], end_ids: Collection[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tokens[:end]


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
