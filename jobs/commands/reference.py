"""What an audit compares with: plain decoding by the engine, and `generate` of transformers."""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from exspec.actors.engine import (
    Completion,
    Engine,
    EngineConfig,
    Request,
    RequestError,
    Sampling,
    SequenceStatistics,
)
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.kv.memory import MEBIBYTE
from exspec.actors.engine.layers.adapters import using
from exspec.actors.engine.shape.plan import fit
from exspec.actors.engine.tokens.constraint import tokens_of
from exspec.actors.exactness import transformers_generate
from exspec.actors.models import Pair
from exspec.pipeline.errors import JobError


def fitted(shape: EngineConfig, pair: Pair, budget: int) -> EngineConfig:
    """The job's shape with as many pages as fit into the budget. Raises JobError if the batch does not fit."""
    try:
        config = fit(pair.target.config, None, shape, pair.target.dtype, budget)
    except ValueError as error:
        raise JobError(str(error)) from error
    if config.batch_size < shape.batch_size:
        raise JobError(f"memory: the job's batch of {shape.batch_size} does not fit into {budget / MEBIBYTE:.0f} MiB")
    return config


def decode(target: PreTrainedModel, config: EngineConfig, requests: Iterable[Request]) -> dict[Hashable, Completion]:
    """Completions by the requests' ids. A request that the engine refuses has none."""
    engine = Engine(target, None, config)
    for request in requests:
        try:
            engine.submit(request)
        except RequestError:
            continue  # the job must have written an error row
    return {completion.id: completion for completion in engine.run()}


def is_greedy(request: Request) -> bool:
    """Whether `generated` gives the tokens that the request asks for: the likeliest ones, without further rules."""
    sampling = Sampling(seed=request.sampling.seed, top_k=request.sampling.top_k, top_p=request.sampling.top_p,
                        min_p=request.sampling.min_p)  # fmt: skip
    free = not (request.min_new_tokens or request.ignore_end or request.bad_words)
    return free and request.sampling == sampling


def _adapted(request: Request) -> AbstractContextManager[None]:
    """Forwards inside use the request's adapter."""
    return using(torch.tensor([request.adapter]))  # on the host: its layers may lie on several devices


def generated(model: PreTrainedModel, request: Request) -> Completion:
    """The completion that transformers generates for one prompt, ended where the engine would end it."""
    ends = model_end_ids(model) | request.end_ids

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        return _allowed(request, ids[len(request.prompt) :].tolist())

    constraint = allowed if request.constraint else None
    with _adapted(request):
        (tokens,) = transformers_generate(
            model, [request.prompt], request.max_new_tokens, ends, prefix_allowed_tokens_fn=constraint
        )
    check = request.stop() if request.stop else None
    for i, token in enumerate(tokens):
        stopped = check(token) if check else None
        if token in ends or stopped is not None:
            by = token if token in ends else stopped
            return Completion(request.id, tokens[: i + 1], "stop", by, SequenceStatistics(completion_tokens=i + 1))
    return Completion(request.id, tokens, "length", None, SequenceStatistics(completion_tokens=len(tokens)))


def margin(model: PreTrainedModel, request: Request, tokens: Sequence[int]) -> float | None:
    """By how much the best next token's logit leads after these tokens. None if only one token is allowed."""
    logits = _logits(model, request, tokens)[-1]
    if request.constraint:
        logits = logits[_allowed(request, tokens)]
    best = logits.topk(min(2, len(logits))).values
    return float(best[0] - best[1]) if len(best) > 1 else None


def mean_logprob(model: PreTrainedModel, request: Request, tokens: Sequence[int]) -> float:
    """The mean log-probability of tokens after a request's prompt."""
    logprobs = _logits(model, request, tokens)[len(request.prompt) - 1 : -1].log_softmax(-1)
    return float(logprobs.gather(1, torch.tensor(tokens, device=model.device)[:, None]).mean())


def pooled(model: PreTrainedModel, request: Request) -> Completion:
    """The completion of an engine that embeds, by one forward. model: without an output head."""
    assert request.given is not None
    states = _logits(model, request, request.given[:-1])[len(request.prompt) - 1 :]
    statistics = SequenceStatistics(completion_tokens=len(states))
    return Completion(request.id, list(request.given), "length", None, statistics, state=states.sum(0).cpu().numpy())


@torch.inference_mode()
def _logits(model: PreTrainedModel, request: Request, tokens: Sequence[int]) -> torch.Tensor:
    """The logits [T, V] after each token of a request's prompt and of these tokens, with the request's adapter."""
    with _adapted(request):
        ids = torch.tensor([[*request.prompt, *tokens]], device=model.device)
        return model(input_ids=ids).logits[0].float()  # type: ignore[no-any-return]


def _allowed(request: Request, tokens: Sequence[int]) -> list[int]:
    assert request.constraint is not None
    walk = request.constraint()
    for token in tokens:
        walk.advance(token)
    return tokens_of(walk.allowed())
