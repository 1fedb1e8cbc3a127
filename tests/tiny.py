"""Tiny models with random weights, prompts, scripted drafters and slow, obvious oracles."""

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from transformers import (
    Glm4Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.auto import AutoModelForCausalLM

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.drafters import drafter_class
from exspec.actors.engine.drafters.clover_head import CloverConfig, CloverHead
from exspec.actors.engine.drafters.drafter import Draft, Drafter
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head
from exspec.actors.engine.kv.attention import trial
from exspec.actors.engine.layers.fused import compiler_trial
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.tokens.sampling import gumbel_noise

VOCABULARY = 61
CONTEXT = 96
ENDS = (5, 6)

_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2}  # fmt: skip
_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
           "bos_token_id": None, "eos_token_id": list(ENDS), "pad_token_id": 0}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, **_SHAPE),
    "qwen2": Qwen2Config(**_COMMON, **_SHAPE),
    "qwen3": Qwen3Config(**_COMMON, **_SHAPE, head_dim=16),
    "glm4": Glm4Config(**_COMMON, **_SHAPE, head_dim=16, partial_rotary_factor=0.5),
    "mistral": MistralConfig(**_COMMON, **_SHAPE, sliding_window=None),
    "gpt2": GPT2Config(**{**_COMMON, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}


def in_place() -> bool:
    """Whether attention can read KV in its pages here: on a machine without a compiler it cannot."""
    return trial(torch.device("cpu"), torch.float32, 4, 2, 8, 8) is None


def need(attention: str | None, kernels: str | None = None) -> None:
    """Skip a test of what this machine cannot run."""
    if attention == "in_place" and not in_place():
        pytest.skip("no compiler for the kernel of attention in place")
    if kernels == "compiled" and (not in_place() or compiler_trial(torch.device("cpu")) is not None):
        pytest.skip("nothing can be compiled here")


def model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    settings = {k: v for k, v in FAMILIES[family].to_dict().items() if k != "layer_types"}
    config = type(FAMILIES[family])(**settings | changes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()  # type: ignore[no-any-return]


def deep(layers: int = 6, agreement: float = 0.06, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """One whose later layers change so little of what the first one says that its exits are sometimes right."""
    made = model(num_hidden_layers=layers)
    with torch.no_grad():
        for layer in list(layers_of(made))[1:]:
            layer.self_attn.o_proj.weight *= agreement  # type: ignore[operator]
            layer.mlp.down_proj.weight *= agreement  # type: ignore[operator]
    return made.to(dtype)


def head(
    target: PreTrainedModel, seed: int = 1, dtype: torch.dtype = torch.float32, size: int = 41, **changes: Any
) -> Eagle3Head:
    """A head of EAGLE-3 with random weights that can propose `size` of the target's tokens."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": VOCABULARY, "initializer_range": 0.3}  # fmt: skip
    aux_layers = changes.pop("aux_layers", [1, 2, target.config.get_text_config().num_hidden_layers - 1])
    config = Eagle3Config(aux_layers, size, 32, **shape | changes)
    torch.manual_seed(seed)
    made = Eagle3Head(config)
    made.d2t += torch.randperm(VOCABULARY)[:size].sort().values - torch.arange(size)
    return made.to(dtype).eval()  # type: ignore[no-any-return]


def clover(target: PreTrainedModel, seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> CloverHead:
    """A head of Clover with random weights."""
    text = target.config.get_text_config()
    shape = {"hidden_size": text.hidden_size, "intermediate_size": 64, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": text.vocab_size, "initializer_range": 0.3}  # fmt: skip
    torch.manual_seed(seed)
    return CloverHead(CloverConfig(**shape | changes)).to(dtype).eval()  # type: ignore[no-any-return]


def draft_of(drafter: str, target: PreTrainedModel, seed: int = 1) -> PreTrainedModel | None:
    """What a drafter drafts with."""
    if drafter == "eagle3":
        return head(target, seed, target.dtype)
    if drafter == "clover":
        return clover(target, seed, target.dtype)
    return model(seed=seed, dtype=target.dtype) if drafter_class(drafter).needs_draft else None


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of very different lengths, from one token up, with pad and end ids among their tokens."""
    rng = random.Random(seed)
    lengths = [1, 2, longest, *(rng.choice([1, 3, 8, 17, 18, longest // 2, longest]) for _ in range(count))][:count]
    made = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
    for prompt in made[::3]:
        prompt[rng.randrange(len(prompt))] = rng.choice([0, *ENDS])
    return made


def generate(target: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """transformers' greedy `generate` of one prompt: the oracle in float32."""
    ids = torch.tensor([list(prompt)], device=target.device)
    output = target.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's presence and frequency penalties, which transformers lacks."""

    def __init__(self, prompt: int, sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        for token, count in Counter(ids[0, self.prompt :].tolist()).items():
            logits[0, token] -= self.sampling.presence_penalty + self.sampling.frequency_penalty * count
        return logits


@torch.inference_mode()
def slow_decode(
    target: PreTrainedModel, prompt: Sequence[int], sampling: Sampling, max_new_tokens: int, **request: Any
) -> list[int]:
    """One sequence, one token at a time, no cache, logits processed by transformers; noise as the engine defines it.

    request: what else a request may ask for: min_new_tokens, ignore_end, bad_words.
    """
    processors = LogitsProcessorList()
    if least := request.get("min_new_tokens"):
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), least, sorted(ENDS)))
    if words := request.get("bad_words"):
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in words]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(Penalties(len(prompt), sampling))
    if sampling.temperature > 0:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            processors.append(MinPLogitsWarper(sampling.min_p))
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new_tokens:
        ids = torch.tensor([tokens])
        logits = processors(ids, target(input_ids=ids).logits[:, -1].float())[0]
        if sampling.temperature > 0:
            noise = gumbel_noise(torch.tensor([sampling.seed]), torch.tensor([[len(tokens)]]), len(logits))
            logits = logits + noise[0, 0]
        tokens.append(int(logits.argmax()))
        if tokens[-1] in ENDS and not request.get("ignore_end"):
            break
    return tokens[len(prompt) :]


@dataclass
class Scripted(Drafter):
    """A drafter that proposes the reference continuation, each token right by a seeded coin of odds `right`."""

    reference: dict[Hashable, list[int]]
    right: float
    vocabulary: int = VOCABULARY
    asked: list[tuple[int, int]] = field(default_factory=list)  # (rows, count) of every round

    def propose(self, group: Group, limits: list[int]) -> Draft:
        count = max(limits)
        self.asked.append((sum(map(bool, group.sequences)), count))
        rows = [self._row(s.request.id, len(s.committed), count) if s else [0] * count for s in group.sequences]
        return Draft(torch.tensor(rows, dtype=torch.long).reshape(len(rows), count), torch.tensor(limits))

    def _row(self, name: Hashable, done: int, count: int) -> list[int]:
        rest = [*self.reference[name][done:], *[0] * count][:count]
        return [
            token if random.Random(f"{name} {done + i}").random() < self.right else (token + 1) % self.vocabulary
            for i, token in enumerate(rest)
        ]


def decode(engine: Engine, requests: Sequence[Request], shuffle: int | None = None) -> dict[Hashable, list[int]]:
    """Run the requests, in shuffled order if asked, checking every invariant after every round."""
    order = list(requests)
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    for request in order:
        engine.submit(request)
    done = {}
    while engine.busy:
        engine.step()
        engine.check()
        done |= {completion.id: completion for completion in engine.take()}
    assert set(done) == {request.id for request in requests}
    return {name: completion.tokens for name, completion in done.items()}


def requests(
    rows: Sequence[Sequence[int]], max_new_tokens: int = 20, sampling: Sampling | None = None
) -> list[Request]:
    """One request a prompt; with sampling, each under a seed of its own."""
    made = []
    for i, row in enumerate(rows):
        own = Sampling(**{**vars(sampling), "seed": 1000 + i}) if sampling else Sampling()
        made.append(Request(i, row, max_new_tokens=max_new_tokens, sampling=own))
    return made


def engine(target: Any, drafter: Any = None, draft: Any = None, **config: Any) -> Engine:
    """An engine with small shapes; `drafter` replaces the draft model, or is the name of another."""
    if isinstance(drafter, str):
        config["drafter"], drafter = drafter, None
    shape = EngineConfig(**{
        "batch_size": 4, "window": 10, "draft_tokens": 3, "bucket": 32, "capacity": CONTEXT, "prefill_columns": 8,
        "prefill_rows": 1, "attention": "gathered",
        **config,
    })  # fmt: skip
    if drafter is None:
        return Engine(target, draft or target, shape)
    return Engine(target, None, shape, drafter=lambda _: drafter)


class Weightless:
    """What models without weights have of transformers' interface."""

    device, dtype = torch.device("cpu"), torch.float32
    generation_config = None

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def get_output_embeddings(self) -> None:
        return None

    def parameters(self) -> list[Tensor]:
        return []

    buffers = modules = parameters


class ArithmeticModel(Weightless):
    """A model whose every next token can be worked out by hand, behind transformers' interface.

    KV holds (token, position) themselves, and the next token is a weighted sum over all KV columns, so one
    column lost, doubled, stale or out of place changes the tokens.
    """

    def __init__(self, context: int = 64) -> None:
        text = SimpleNamespace(num_attention_heads=1, head_dim=2, hidden_size=2, num_hidden_layers=1)
        text.vocab_size, text.max_position_embeddings, text.eos_token_id = VOCABULARY, context, ENDS[0]
        self.config = SimpleNamespace(get_text_config=lambda: text)

    @staticmethod
    def next_token(tokens: Sequence[int]) -> int:
        return sum((token + 1) * (7 * i + 3) for i, token in enumerate(tokens)) % VOCABULARY

    @classmethod
    def continuation(cls, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int] = ENDS[:1]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) - len(prompt) < max_new_tokens:
            tokens.append(cls.next_token(tokens))
            if tokens[-1] in ends:
                break
        return tokens[len(prompt) :]

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Any, **_: Any
    ) -> Any:
        own = torch.stack([input_ids, position_ids], dim=-1)[:, None].float()  # [R, 1, Q, 2]
        keys, _values = past_key_values.update(own, own, 0)
        if attention_mask.dtype == torch.int32:  # [R, 1, 1, 2 + n]: start, end and pages of each row
            places = attention_mask[:, 0, 0]
            keys = keys[places[:, 2:].long()].flatten(1, 2)[:, None, :, 0]  # [R, 1, S, 2]
            seen = torch.arange(keys.shape[2]) <= position_ids[..., None]
        elif attention_mask.ndim == 2:  # [R, S]: every column up to the query's own
            width = attention_mask.shape[1]
            columns = torch.arange(width)
            queries = columns[width - input_ids.shape[1] :]
            seen = attention_mask[:, None].bool() & (columns <= queries[:, None])
        weights = (keys[:, 0, :, 0] + 1) * (7 * keys[:, 0, :, 1] + 3)
        total = (seen * weights[:, None]).sum(-1).long()
        logits = torch.nn.functional.one_hot(total % VOCABULARY, VOCABULARY).float()
        return SimpleNamespace(logits=logits)
