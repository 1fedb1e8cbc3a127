"""The page of model families: `python -m tests.tools.families` tries every causal language model of transformers.

It builds a tiny model of each family with random weights and checks it as a job does. If the model is accepted, it
compares the engine's tokens with those of `generate`, one prompt at a time.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from exspec.actors.engine import Engine, EngineConfig, Request
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.exactness import check_config, check_forward, fix_rotary_factors, transformers_generate
from exspec.actors.models import forget_sampling
from exspec.actors.source import ModelError

PAGE = Path(__file__).parents[2] / "jobs" / "docs" / "families.md"
VOCABULARY, CONTEXT, END = 96, 96, 5
LENGTHS, NEW = (1, 3, 30, 17, 40), 12  # tokens of the prompts, and of each completion at most
LARGEST = 20_000_000  # parameters of a small model, at most
MADE = "Every family for which transformers has a causal language model, as `python -m tests.tools.families` found it"
BUILD = "could not be built small"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WIDER = 8  # factor on the widths of a mixture in bfloat16, so that its products round as in large models
# Sizes of a tiny model, by their names in configurations: first the ones that WIDER multiplies.
WIDTHS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("global_head_dim", "rotary_dim", "kv_channels"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
}
SIZES: dict[str, Any] = {
    **WIDTHS,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), CONTEXT),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 16),
    **dict.fromkeys(EXPERTS, 4),
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "initializer_range": 0.3, "is_decoder": True,
    "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 3.0, "original_max_position_embeddings": 32}
# Configurations that are tried beside a family's default.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"dynamic NTK": {"rope_parameters": DYNAMIC}, "YaRN": {"rope_parameters": YARN}},
    "mistral": {"no window": {"sliding_window": None}},
    "phi3": {"longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}},
    "qwen2": {"windows": {"use_sliding_window": True, "max_window_layers": 1}},
}

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# Sizes without which a family cannot be built.
NEEDS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "hunyuan_v1_dense": {"head_dim": 8, "rope_parameters": PLAIN},
    "hunyuan_v1_moe": {"head_dim": 8, "rope_parameters": PLAIN},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8, "rope_parameters": PLAIN},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 12)},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Trial:
    """The result for a family: works, refused, differs, or could not be built small. narrow: why not in bfloat16."""

    family: str
    result: str
    reason: str = ""
    narrow: str = ""


def configurations() -> Iterator[tuple[str, Callable[[], PretrainedConfig]]]:
    """Every family of transformers and its variants, by name, with what builds the small configuration."""
    own = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.__module__.startswith("transformers.")}
    for kind in sorted(own, key=lambda kind: kind.model_type):
        yield kind.model_type, lambda kind=kind: small(kind)  # type: ignore[misc]
        for name, changes in VARIANTS.get(kind.model_type, {}).items():
            yield f"{kind.model_type}, {name}", lambda kind=kind, changes=changes: small(kind, changes)  # type: ignore[misc]


def small(kind: type[PretrainedConfig], changes: dict[str, Any] | None = None, times: int = 1) -> PretrainedConfig:
    """A configuration with small sizes and one layer of each kind that the default has, two layers at least.

    times: a factor on the widths.
    """
    default = kind()
    parts = {name: getattr(default, name, None) for name in getattr(kind, "sub_configs", {})}
    nested = {name: _sizes(part, times) for name, part in parts.items() if isinstance(part, PretrainedConfig)}
    return kind(**_sizes(default, times) | nested | NEEDS.get(kind.model_type, {}) | (changes or {}))


def _sizes(default: PretrainedConfig, times: int) -> dict[str, Any]:
    known = default.to_dict()
    sizes = SIZES | {name: size * times for name, size in WIDTHS.items()}
    found = {name: size for name, size in sizes.items() if known.get(name) is not None or name.endswith("_token_id")}
    if types := known.get("layer_types"):
        kinds = list(dict.fromkeys(types))
        layers = kinds if len(kinds) > 1 else kinds * 2
        found |= {"layer_types": layers}
        found |= {name: len(layers) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in found}
    return found


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A model with random weights. Raises ValueError if it is not small."""
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(config).num_parameters()
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters with the sizes that are known")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-any-return]


def trial(family: str, make: Callable[[], PretrainedConfig]) -> Trial:
    """Build a model, check it and compare its tokens. Any exception while building is the trial's reason."""
    try:
        config = make()
        check_config(config, family)
        model = build(config)
    except ModelError as error:
        return Trial(family, "refused", _reason(error))
    except Exception as error:
        return Trial(family, BUILD, f"{type(error).__name__}: {' '.join(str(error).split())}")
    forget_sampling(model)
    try:
        fix_rotary_factors(model)
        check_forward(model, family)
    except ModelError as error:
        return Trial(family, "refused", _reason(error))
    wrong = compare(model)
    if wrong:
        return Trial(family, "differs", wrong)
    if any((getattr(config.get_text_config(), name, 0) or 0) > 1 for name in EXPERTS):
        model = build(small(type(config), times=WIDER))
        forget_sampling(model)
        fix_rotary_factors(model)
    try:
        check_forward(model.to(torch.bfloat16), family)  # type: ignore[arg-type]
    except ModelError as error:
        return Trial(family, "works", narrow=_reason(error))
    return Trial(family, "works", narrow=neighbours(model))


def compare(model: PreTrainedModel) -> str:
    """How completions by batched speculation, with the model as its own draft, differ from `generate`'s, if they do."""
    prompts = _prompts(model)
    found = _decoded(model, prompts)
    ends = model_end_ids(model)
    wrong = [n for n, prompt in enumerate(prompts) if [found[n]] != transformers_generate(model, [prompt], NEW, ends)]
    return f"{len(wrong)} of {len(prompts)} completions are not those of generate" if wrong else ""


def neighbours(model: PreTrainedModel) -> str:
    """How completions differ from the engine's for each prompt alone, if they do."""
    prompts = _prompts(model)
    found = _decoded(model, prompts)
    wrong = [n for n, prompt in enumerate(prompts) if found[n] != _decoded(model, [prompt])[0]]
    return f"{len(wrong)} of {len(prompts)} completions depend on their neighbours" if wrong else ""


def _context(model: PreTrainedModel) -> int:
    return min(CONTEXT, int(model.config.get_text_config().max_position_embeddings))


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [min(length, _context(model) - NEW) for length in LENGTHS]
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def _decoded(model: PreTrainedModel, prompts: list[list[int]]) -> dict[Any, list[int]]:
    """Completions by batched speculation, by the prompts' numbers."""
    engine = Engine(model, model, EngineConfig(batch_size=4, draft_tokens=3, capacity=_context(model)))
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt, NEW))
    return {completion.id: completion.tokens for completion in engine.run()}


def _reason(error: ModelError) -> str:
    """Why a model was refused, without the family's name and without what would work."""
    return str(error).partition(": ")[2].rpartition("; expected ")[0]


def page(trials: list[Trial]) -> str:
    """The page, as Markdown."""
    works = [t for t in trials if t.result == "works"]
    lines = [
        "# Model families",
        "",
        f"{MADE} with transformers {transformers.__version__}.",
        "Each job tests its own model too. With another configuration a rejected family may work, and vice versa.",
        "",
        "**Method.** A tiny model of the family has random weights and a layer of each kind. It decodes five prompts",
        f"in batches of 4, with itself as the draft. In float32 {NEW} tokens of each must equal those of `generate`.",
        "In bfloat16 they must equal those of the engine for the prompt alone.",
        "",
        f"{len(works)} of {len(trials)} work, {sum(bool(t.narrow) for t in works)} of them in float32 only.",
        "",
        "## Works",
        "",
        ", ".join(f"`{t.family}`" for t in works if not t.narrow),
    ]
    lines += _grouped("Works in float32 only", [replace(t, reason=t.narrow) for t in works if t.narrow])
    lines += _grouped("Accepted, but the tokens differ", [t for t in trials if t.result == "differs"])
    lines += _grouped("Rejected", [t for t in trials if t.result == "refused"])
    return "\n".join([*lines, *_grouped(f"Not tried: {BUILD}", [t for t in trials if t.result == BUILD]), ""])


def _grouped(title: str, trials: list[Trial]) -> list[str]:
    """A section of families by reason and detail; no lines without any."""
    groups: dict[str, dict[str, list[str]]] = {}
    for t in trials:
        reason, detail = _general(t)
        groups.setdefault(reason, {}).setdefault(detail, []).append(f"`{t.family}`")
    rows = []
    for reason, details in sorted(groups.items()):
        parts = [f"{detail}{', '.join(names)}" for detail, names in sorted(details.items())]
        rows.append(f"- {reason}: {'; '.join(parts)}")
    return ["", f"## {title}", "", *rows] if rows else []


def _general(t: Trial) -> tuple[str, str]:
    """The reason without the model's name, and what it has in brackets without messages of torch and transformers."""
    name = re.escape(t.family.partition(",")[0]) + r"\w*"
    reason = re.sub(rf"^{name} | of {name}| \({name}\)", "", t.reason)
    reason = re.sub(r"(\w+Error): .*", r"\1)", reason)
    reason, _, detail = reason.removesuffix(")").partition(" (")
    return reason, f"({detail}) " if detail and not detail.startswith("'") else ""


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    only = set(sys.argv[1:])
    trials = []
    for family, make in configurations():
        if only and family not in only:
            continue
        trials.append(trial(family, make))
        print(f"{family}: {trials[-1].result} {trials[-1].reason} {trials[-1].narrow}".rstrip(), flush=True)
    if not only:
        PAGE.write_text(page(trials), encoding="utf-8")


if __name__ == "__main__":
    main()
