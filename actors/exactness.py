"""Checks that reject models which the engine cannot decode exactly."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from exspec.actors.engine.faults import first_line
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import GATHERED, PagedModel, context_length, kv_shape
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.kv.split import Split, SplitModel
from exspec.actors.engine.layers import experts
from exspec.actors.engine.layers.packed import is_quantized, quantization
from exspec.actors.engine.layers.runtime_copy import runtime_copy
from exspec.actors.source import ModelError

WHAT_WORKS = "a decoder-only model that holds keys and values of every token, such as Llama, Qwen, Mistral or GLM-4"
NEEDED = ("num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
WINDOWS = ("sliding_window", "attention_chunk_size")  # attributes of configurations and modules, in tokens
FED, FIRST = 12, 7  # tokens of `check_forward`; the first forward takes FIRST of them
NARROW = 4  # tokens of the windows and chunks in `check_forward`
SHAPES = ((4, 1), (4, 6), (2, 64))  # rows and columns of a round without drafts, a verify and a prefill
CHANGING = ("dynamic", "longrope")  # types of rotary factors that each forward chooses anew
WAITING_OPERATIONS = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "repeat_interleave", "unique",
    "_unique2", "unique_consecutive",
}  # fmt: skip


def check_config(config: PretrainedConfig, name: str) -> None:
    """Reject models that do not hold the keys and values of every token in every layer: encoder-decoders, recurrent
    layers, and layers that share another layer's KV. `check_forward` tests whether other models decode exactly.

    Raises ModelError.
    """
    if config.is_encoder_decoder:
        raise ModelError(f"{name}: an encoder-decoder model ({config.model_type}); expected {WHAT_WORKS}")
    text = config.get_text_config()
    try:
        missing = [key for key in NEEDED if not getattr(text, key, None)]
        if not missing:
            kv_shape(config)
    except RuntimeError as error:  # transformers raises it for layers of different shapes
        reason = f"the layers of {config.model_type} have different shapes ({first_line(error)})"
        raise ModelError(f"{name}: {reason}; expected {WHAT_WORKS}") from error
    if missing:
        raise ModelError(f"{name}: the configuration of {config.model_type} has no {missing[0]}; expected {WHAT_WORKS}")
    others = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if others:
        kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        names = ", ".join(sorted(kinds) or sorted(layer.__name__ for layer in others))
        raise ModelError(
            f"{name}: the cache of {config.model_type} does not hold the keys and values of every token ({names}); "
            f"expected {WHAT_WORKS}"
        )


def limit_context(config: PretrainedConfig) -> None:
    """Shorten the context of a longrope model to the length up to which one set of rotary factors applies.

    A longer sequence needs a second set, and transformers' `generate` then recomputes all its keys.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    limits = [p["original_max_position_embeddings"] for p in nested or [parameters] if p.get("rope_type") == "longrope"]
    if limits:
        text.max_position_embeddings = min(text.max_position_embeddings, *limits)


def fix_rotary_factors(model: PreTrainedModel) -> None:
    """Limit the context, and fix the rotary factors to the ones that apply within it.

    Otherwise every forward would choose them by its longest row, and on a GPU wait to learn that length.
    """
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
    """Reject a model whose logits differ between the engine's forwards and the model's own.

    This finds what no configuration shows: positions counted from a mask, rotary factors chosen by the longest row,
    attention that ignores a window, forwards that wait for the device. The check feeds a few tokens at given positions.
    It narrows windows and chunks to fewer tokens than that, on a copy of the modules that shares the model's weights.

    bits: require that no bit of a row's logits depends on the rows beside it. A draft model need not meet this: drafts
    decide no token. Raises ModelError with what differed.
    """
    inexact = False
    try:
        inexact = bits and not (choose_experts(model) and _keeps_bits(model))
        reason = _positions_mixed(model) or _paged_differs(_narrowed(model))
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    kind = model.config.model_type
    if reason:
        raise ModelError(f"{name}: {kind} decodes differently in slots than alone ({reason}); expected {WHAT_WORKS}")
    if inexact and is_quantized(model.config):
        raise ModelError(
            f"{name}: quantized by {quantization(model.config)}, a row's logits in {kind} depend on the other rows of "
            "its batch; expected activations that are not quantized, or with a scale per token"
        )
    if inexact:
        raise ModelError(
            f"{name}: in {str(model.dtype).removeprefix('torch.')}, a row's logits in {kind} depend on the other rows "
            "of its batch; expected float32, where the difference is no larger than rounding errors"
        )


def _keeps_bits(model: PreTrainedModel) -> bool:
    """Whether no bit of a row's logits depends on the rows beside it. Quantized activations may share a scale."""
    return not is_quantized(model.config) or not _depends_on_other_rows(model)


def choose_experts(model: PreTrainedModel) -> bool:
    """Choose how a mixture's experts are computed: the fastest implementation in which no bit of a row's logits depends
    on the rows beside it. Returns whether there is one, and True for a model without a module named after experts.

    In float32 the first implementation is taken untested: its differences are as small as between any two shapes.
    """
    if not any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules()):
        return True
    for number, implementation in enumerate(experts.implementations(model.device)):
        if implementation is not None:
            model.set_experts_implementation(implementation)
        try:
            if model.dtype == torch.float32 or not _depends_on_other_rows(model):
                return True
        except torch.OutOfMemoryError:
            if number == 0:
                raise
    return False


@torch.inference_mode()
def _depends_on_other_rows(model: PreTrainedModel) -> bool:
    """Whether any bit of a row's logits changes with the other rows: copies of it, or random tokens."""
    size: int = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    for rows, columns in SHAPES:
        columns = min(columns, context_length(model.config))
        tokens = torch.randint(size, (1, columns), generator=generator)
        others = [torch.randint(size, (rows - 1, columns), generator=generator) for _ in range(3)]
        results = []
        for other in (tokens.expand(rows - 1, -1), *others):
            ids = torch.cat([tokens, other]).to(model.device)
            results.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0])
        if not all(logits.equal(results[0]) for logits in results):
            return True
    return False


def _narrowed(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with attention windows and chunks narrower than the tokens that the check feeds."""
    if not any(getattr(model.config.get_text_config(), key, None) for key in WINDOWS):
        return model
    narrow = runtime_copy(model, None, packed=False)
    for owner in (narrow.config, narrow.config.get_text_config(), *narrow.modules()):
        for key in WINDOWS:
            if isinstance(width := getattr(owner, key, None), int) and not isinstance(width, bool) and width > NARROW:
                setattr(owner, key, NARROW)
    return narrow


def _tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Two rows [2, count] of tokens that differ at every position."""
    ids = torch.arange(1, count + 1, device=model.device)
    size: int = model.config.get_text_config().vocab_size
    return torch.stack([ids, ids + count]) % size


def _positions_mixed(model: PreTrainedModel) -> str | None:
    """Run a row at the start of the context beside one at its end, and each alone. Returns what differs, or None."""
    tokens = _tokens(model, FED)
    near = torch.arange(FED, device=model.device)
    far = near + max(context_length(model.config) - FED, 0)
    rough = is_quantized(model.config)

    def logits(rows: Tensor, positions: list[Tensor]) -> Tensor:
        mask = torch.ones_like(rows)
        output = model(input_ids=rows, attention_mask=mask, position_ids=torch.stack(positions))
        return output.logits  # type: ignore[no-any-return]

    together, swapped = logits(tokens, [near, far]), logits(tokens.flip(0), [far, near])
    for row, positions in enumerate((near, far)):
        alone = logits(tokens[row : row + 1], [positions])[0]
        if not (_same(together[row], alone, rough) and _same(swapped[1 - row], alone, rough)):
            return "a row's logits depend on the positions of the rows beside it"
    return None


def _paged_differs(model: PreTrainedModel) -> str | None:
    """Feed a row through pages in two forwards, beside one at another position. Returns what differs, or None."""
    tokens = _tokens(model, FED)
    expected = _own_logits(model, tokens[:1])
    pages = Pages(2, pages=2 * FED, size=NARROW - 1, chunk=NARROW - 1, longest=3 * FED, device=model.device)
    for slot in (0, 1):
        pages.begin(slot, [], 0, 2 * FED, 0)
    split = Split.of(model)
    cached = PagedModel(model, pages, GATHERED) if split is None else SplitModel(model, split, pages, GATHERED)
    slots = torch.tensor([1, 0], device=model.device)
    # The second row has other tokens, so that mixing up the rows changes the logits.
    cached.forward(Batch(slots, tokens[:, :FIRST], torch.zeros_like(slots), FED))
    second = torch.stack([tokens[0, FIRST:], tokens[1, : FED - FIRST]])
    starts = torch.tensor([FIRST, 1], device=model.device)
    with Waits() as waits:
        logits = cached.forward(Batch(slots, second, starts, 2 * FED))[0]
    if waits.names and model.device.type == "cuda":
        return f"its forward waits for the device: {waits.names[0]}"
    return None if _same(logits, expected, is_quantized(model.config)) else "its logits differ"


def _own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [FED - FIRST, V] after each token of a row [1, FED] past the first FIRST, computed as `generate` does:
    FIRST tokens as a prompt, then one token at a time, with transformers' cache."""
    output = model(input_ids=tokens[:, :FIRST], use_cache=True)
    logits = []
    for n in range(FIRST, FED):
        output = model(input_ids=tokens[:, n : n + 1], past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


def _same(logits: Tensor, expected: Tensor, rough: bool) -> bool:
    """Whether logits [Q, V] are equal up to rounding; NaN never is.

    In half precision, and where `rough` (activations may be quantized), the median over the columns counts: rounding
    may route single tokens to other experts, while a fault of the model shows in all columns.
    """
    off = (logits.float() - expected.float()).abs().amax(-1) / expected.float().abs().max()  # [Q]
    rough = rough or logits.dtype in (torch.bfloat16, torch.float16)
    return bool(off.median() <= 0.1 if rough else off.max() <= 1e-3)


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
    """Records operations that no CUDA graph can hold: Python waits for the result, or its shape depends on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITING_OPERATIONS or by_mask:
            self.names.append(f"{name} by a mask" if by_mask else name)
        return function(*args, **(kwargs or {}))
