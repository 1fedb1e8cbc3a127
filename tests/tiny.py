"""Tiny models with random weights, prompts, scripted drafters and slow, obvious oracles."""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from exspec.actors.engine import Completion, Engine, EngineConfig, Request, Sampling, SequenceStatistics
from exspec.actors.engine.config import COMPILED
from exspec.actors.engine.drafters.clover_head import CloverConfig, CloverHead
from exspec.actors.engine.drafters.dflash_head import DFlashConfig, DFlashHead
from exspec.actors.engine.drafters.drafter import Draft, Drafter, MakeDrafter
from exspec.actors.engine.drafters.eagle3_head import Eagle3Config, Eagle3Head
from exspec.actors.engine.drafters.lookup import drafter_class
from exspec.actors.engine.graphs import Recorder
from exspec.actors.engine.kv.attention import trial
from exspec.actors.engine.kv.cached_model import PagedModel
from exspec.actors.engine.layers.adapters import using
from exspec.actors.engine.layers.programs import compiler_trial
from exspec.actors.engine.layers.spans import layers_of
from exspec.actors.engine.methods import drafter_of
from exspec.actors.engine.scheduling.group import Group
from exspec.actors.engine.tokens.constraint import Constraint, tokens_of
from exspec.actors.engine.tokens.sampling import gumbel_noise
from exspec.actors.models import Pair, load_draft
from exspec.actors.source import Source

VOCABULARY = 61
CONTEXT = 96
ENDS = (5, 6)

_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2}  # fmt: skip
_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
           "bos_token_id": None, "eos_token_id": list(ENDS), "pad_token_id": 0}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**_COMMON, **_SHAPE),
    "qwen2": transformers.Qwen2Config(**_COMMON, **_SHAPE),
    "qwen3": transformers.Qwen3Config(**_COMMON, **_SHAPE, head_dim=16),
    "glm4": transformers.Glm4Config(**_COMMON, **_SHAPE, head_dim=16, partial_rotary_factor=0.5),
    "mistral": transformers.MistralConfig(**_COMMON, **_SHAPE, sliding_window=None),
    "gpt2": transformers.GPT2Config(**{**_COMMON, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}


def in_place() -> bool:
    """Whether attention can read KV in place on this machine: that takes a compiler."""
    return trial(torch.device("cpu"), torch.float32, 4, 2, 8, 8) is None


def need(attention: str | None, kernels: str | None = None) -> None:
    """Skip the test if this machine cannot run the attention or the kernels."""
    if attention == "in_place" and not in_place():
        pytest.skip("no compiler for attention in place")
    if kernels in COMPILED and (not in_place() or compiler_trial(torch.device("cpu")) is not None):
        pytest.skip("layers cannot be compiled here")


def model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    settings = {k: v for k, v in FAMILIES[family].to_dict().items() if k != "layer_types"}
    config = type(FAMILIES[family])(**settings | changes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()  # type: ignore[no-any-return]


def deep(layers: int = 6, agreement: float = 0.06, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A Llama whose later layers change the hidden states so little that its early exits are sometimes right."""
    made = model(num_hidden_layers=layers)
    with torch.no_grad():
        for layer in list(layers_of(made))[1:]:
            layer.self_attn.o_proj.weight *= agreement  # type: ignore[operator]
            layer.mlp.down_proj.weight *= agreement  # type: ignore[operator]
    return made.to(dtype)


def _head_shape(target: PreTrainedModel) -> dict[str, Any]:
    text = target.config.get_text_config()
    return {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}  # fmt: skip


def head(
    target: PreTrainedModel, seed: int = 1, dtype: torch.dtype = torch.float32, size: int = 41, **changes: Any
) -> Eagle3Head:
    """An EAGLE-3 head with random weights that can propose `size` of the target's tokens."""
    text = target.config.get_text_config()
    aux_layers = changes.pop("aux_layers", [1, 2, text.num_hidden_layers - 1])
    config = Eagle3Config(aux_layers, size, text.hidden_size, **_head_shape(target) | changes)
    torch.manual_seed(seed)
    made = Eagle3Head(config)
    made.d2t += torch.randperm(text.vocab_size)[:size].sort().values - torch.arange(size)
    return made.to(dtype).eval()  # type: ignore[no-any-return]


def clover(target: PreTrainedModel, seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> CloverHead:
    """A Clover head with random weights."""
    torch.manual_seed(seed)
    return CloverHead(CloverConfig(**_head_shape(target) | changes)).to(dtype).eval()  # type: ignore[no-any-return]


def dflash(target: PreTrainedModel, seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> DFlashHead:
    """A DFlash head with random weights, of two layers."""
    text = target.config.get_text_config()
    layers = {"num_hidden_layers": 2, "head_dim": 8, "target_hidden_size": text.hidden_size, "block_size": 7,
              "aux_layers": [1, text.num_hidden_layers - 1], "mask_token_id": 5}  # fmt: skip
    if changes.get("sliding_window"):
        layers |= {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    torch.manual_seed(seed)
    made = DFlashHead(DFlashConfig(**_head_shape(target) | layers | changes))
    if "d2t" in dict(made.named_buffers()):
        made.d2t += torch.randperm(text.vocab_size)[: len(made.d2t)].sort().values - torch.arange(len(made.d2t))
    if made.mask_embedding is not None:
        torch.nn.init.normal_(made.mask_embedding)
    return made.to(dtype).eval()  # type: ignore[no-any-return]


HEADS: dict[str, Callable[..., PreTrainedModel]] = {"clover": clover, "dflash": dflash, "eagle3": head}


def draft_of(drafter: str, target: PreTrainedModel, seed: int = 1) -> PreTrainedModel | None:
    """The draft model or head that a drafter needs, if any."""
    if drafter in HEADS:
        return HEADS[drafter](target, seed, target.dtype)
    return model(seed=seed, dtype=target.dtype) if drafter_class(drafter).needs_draft else None


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens; every third one has a pad or end id in it."""
    rng = random.Random(seed)
    lengths = [1, 2, longest, *(rng.choice([1, 3, 8, 17, 18, longest // 2, longest]) for _ in range(count))][:count]
    made = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
    for prompt in made[::3]:
        prompt[rng.randrange(len(prompt))] = rng.choice([0, *ENDS])
    return made


def generate(target: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The greedy tokens of one prompt, from transformers' `generate`: the oracle in float32."""
    ids = torch.tensor([list(prompt)], device=target.device)
    output = target.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def greedy(target: PreTrainedModel, rows: Sequence[Sequence[int]], max_new_tokens: int = 20) -> dict[int, list[int]]:
    """`generate` for every prompt, by its number: what `decode` must give for `requests(rows, max_new_tokens)`."""
    return {i: generate(target, row, max_new_tokens) for i, row in enumerate(rows)}


class Penalties(transformers.LogitsProcessor):  # type: ignore[misc]
    """OpenAI's presence and frequency penalties, which transformers lacks."""

    def __init__(self, prompt: int, sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        for token, count in Counter(ids[0, self.prompt :].tolist()).items():
            logits[0, token] -= self.sampling.presence_penalty + self.sampling.frequency_penalty * count
        return logits


class Allowed(transformers.LogitsProcessor):  # type: ignore[misc]
    """Leaves the tokens that a constraint allows next."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        barred = torch.ones_like(scores, dtype=torch.bool)
        allowed = [token for token in tokens_of(self.constraint.allowed()) if token < scores.shape[1]]
        barred[:, allowed] = False
        return scores.masked_fill(barred, -torch.inf)


def slow_decode(target: PreTrainedModel, requests: Sequence[Request]) -> dict[Hashable, list[int]]:
    """One sequence, one token at a time, without a cache; transformers processes the logits, the noise is the engine's.

    The oracle for sampling, penalties, min_new_tokens, ignore_end, bad_words and constraints.
    """
    return {request.id: slow_logprobs(target, request)[0] for request in requests}


@torch.inference_mode()
def slow_logprobs(target: PreTrainedModel, request: Request) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
    """The tokens of `slow_decode`; and for each the log-probabilities [V] of all tokens, by the target alone and in the
    distribution that it was drawn from."""
    prompt, sampling = request.prompt, request.sampling
    processors = transformers.LogitsProcessorList()
    if least := request.min_new_tokens:
        processors.append(transformers.MinNewTokensLengthLogitsProcessor(len(prompt), least, sorted(ENDS)))
    if request.bad_words:
        processors.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in request.bad_words]))
    if sampling.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(Penalties(len(prompt), sampling))
    constraint = request.constraint() if request.constraint else None
    if constraint:
        processors.append(Allowed(constraint))
    if sampling.temperature > 0:
        processors.append(transformers.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            processors.append(transformers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(transformers.TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            processors.append(transformers.MinPLogitsWarper(sampling.min_p))
    tokens, found = list(prompt), []
    while len(tokens) < min(len(prompt) + request.max_new_tokens, CONTEXT):
        ids = torch.tensor([tokens])
        with using(torch.tensor([request.adapter])):
            own = target(input_ids=ids).logits[:, -1].float()
        logits = processors(ids, own.clone())[0]
        found.append((own[0].log_softmax(-1), logits.log_softmax(-1)))
        if sampling.temperature > 0:
            noise = gumbel_noise(torch.tensor([sampling.seed]), torch.tensor([[len(tokens)]]), len(logits))
            logits = logits + noise[0, 0]
        tokens.append(int(logits.argmax()))
        if tokens[-1] in ENDS and not request.ignore_end:
            break
        if constraint:
            constraint.advance(tokens[-1])
    return tokens[len(prompt) :], found


@dataclass
class Scripted(Drafter):
    """Proposes the reference continuation; each token is right with probability `right`, by a seeded coin."""

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


def run(engine: Engine, requests: Sequence[Request], shuffle: int | None = None) -> dict[Hashable, Completion]:
    """Decode the requests, in shuffled order if asked. Checks every invariant after every round."""
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
    return done


def decode(engine: Engine, requests: Sequence[Request], shuffle: int | None = None) -> dict[Hashable, list[int]]:
    """The tokens of `run`."""
    return {name: completion.tokens for name, completion in run(engine, requests, shuffle).items()}


def total(done: dict[Hashable, Completion]) -> SequenceStatistics:
    return sum((completion.statistics for completion in done.values()), start=SequenceStatistics())


def requests(
    rows: Sequence[Sequence[int]], max_new_tokens: int = 20, sampling: Sampling | None = None, **settings: Any
) -> list[Request]:
    """One request per prompt, numbered from 0. With sampling, each has its own seed."""
    samplings = [replace(sampling, seed=1000 + i) if sampling else Sampling() for i in range(len(rows))]
    return [Request(i, row, max_new_tokens, samplings[i], **settings) for i, row in enumerate(rows)]


def config(**changes: Any) -> EngineConfig:
    """Small shapes, in which prompts take several chunks and sequences several pages and buckets."""
    shape = {"batch_size": 4, "window": 10, "draft_tokens": 3, "bucket": 32, "capacity": CONTEXT, "prefill_columns": 8,
             "prefill_rows": 1, "attention": "gathered"}  # fmt: skip
    if changes.get("drafter") == "sparse" and "draft_window" not in changes:
        shape |= {"draft_window": 8, "draft_chosen": 16}  # by default it reads more than the context
    return EngineConfig(**shape | changes)


def engine(
    target: Any,
    drafter: Drafter | str = "model",
    draft: Any = None,
    make: MakeDrafter = drafter_of,
    recorder: Recorder | None = None,
    **changes: Any,
) -> Engine:
    """An engine with small shapes. drafter: the name of one, or a drafter itself. draft: by default, the target."""
    if isinstance(drafter, Drafter):
        return Engine(target, None, config(**changes), None, recorder, lambda _: drafter)
    draft = draft or (target if drafter == "model" else None)
    return Engine(target, draft, config(drafter=drafter, **changes), None, recorder, make)


def load_head(folder: Path | str, dtype: torch.dtype = torch.float32, allow_pickle: bool = False) -> Any:
    """A head for `deep`, loaded as its draft."""
    tokenizer: Any = None
    pair = Pair(deep(5, dtype=dtype), None, tokenizer)
    return load_draft(pair, Source(str(folder), allow_pickle=allow_pickle), "deep")


def kv_bytes(engine: Engine) -> int:
    """Bytes that the KV of target and drafter takes now."""
    held: list[Tensor] = []
    for cached in (engine.target, *engine.drafter.caches):
        if isinstance(cached, PagedModel):
            held += [*cached.keys, *cached.values, *cached.states.values()]
        else:
            held += [kv for layer in cached.cache.layers for kv in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in held)


class Weightless:
    """The parts of transformers' interface that a model without weights needs."""

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
    """A model behind transformers' interface whose tokens can be computed by hand.

    Its KV holds (token, position), and the next token is a weighted sum over all KV columns. So a column that is lost,
    doubled, stale or out of place changes the tokens.
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
            table = attention_mask[:, 0, 0]
            keys = keys[table[:, 2:].long()].flatten(1, 2)[:, None, :, 0]  # [R, 1, S, 2]
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
