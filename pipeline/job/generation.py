"""The sampling settings of a model's generation config, as settings of a job."""

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from transformers import GenerationConfig, PretrainedConfig

from exspec.actors.source import ModelError
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job, problem
from exspec.pipeline.secrets import anonymous

J = TypeVar("J", bound=Job)
# The defaults of transformers' `generate` for a config that samples.
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
# Keys that change tokens and that the engine does not support. Each has the value, beside None, that changes nothing.
UNKNOWN: dict[str, Any] = {
    "begin_suppress_tokens": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "sequence_bias": {},
    "stop_strings": [],
    "watermarking_config": None,
}
UNKNOWN_SAMPLED: dict[str, Any] = {"epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None, "typical_p": 1}
LIMITS = ("min_new_tokens", "bad_words_ids")  # settings that a labeling job does not take


@dataclass(frozen=True)
class OwnSettings:
    """What a model's generation config asks for. settings: of a job, by name. unknown: keys of the config that the
    engine does not support."""

    settings: dict[str, Any]
    unknown: dict[str, Any]

    def without_limits(self) -> "OwnSettings":
        """The same for a job whose answers are constrained: limits on tokens count as unknown."""
        limits = {name: value for name, value in self.settings.items() if name in LIMITS}
        kept = {name: value for name, value in self.settings.items() if name not in LIMITS}
        return OwnSettings(kept, self.unknown | limits)


def load_generation_config(
    place: str, revision: str | None, config: PretrainedConfig, trust_remote_code: bool
) -> GenerationConfig:
    """The generation config of a model in a folder or on the hub, or the one in the model's config, as in transformers.

    Raises ModelError if it is invalid."""
    try:
        return GenerationConfig.from_pretrained(place, revision=revision or "main", trust_remote_code=trust_remote_code)
    except OSError as error:  # transformers raises this for a missing file too
        if (Path(place) / "generation_config.json").exists():
            raise ModelError(f"{place}: generation config: {str(error).splitlines()[0]}") from error
        return GenerationConfig.from_model_config(config)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{place}: generation config: {error}") from error


def own_settings(config: GenerationConfig) -> OwnSettings:
    """What a generation config asks for that differs from the defaults of a job."""
    asked: dict[str, Any] = {name: getattr(config, name, None) for name in ("repetition_penalty", "min_new_tokens")}
    unknown = dict(UNKNOWN)
    if config.do_sample:
        values = {name: getattr(config, name, None) for name in SAMPLED}
        asked |= {name: SAMPLED[name] if value is None else value for name, value in values.items()}
        unknown |= UNKNOWN_SAMPLED
    asked["bad_words_ids"] = _forbidden(config)
    found = {name: getattr(config, name, None) for name in unknown}
    return OwnSettings(
        {name: value for name, value in asked.items() if value not in (None, Job.model_fields[name].default)},
        {name: value for name, value in found.items() if value not in (None, unknown[name])},
    )


def _forbidden(config: GenerationConfig) -> list[list[int]]:
    """Forbidden token sequences. A lone end token does not count, as in transformers, unless it is suppressed."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    alone = [[token] for token in ends]
    words = [list(word) for word in getattr(config, "bad_words_ids", None) or [] if list(word) not in alone]
    suppressed = [[token] for token in getattr(config, "suppress_tokens", None) or []]
    return words + [word for word in suppressed if word not in words]


def with_own(job: J, own: OwnSettings) -> J:
    """The job with the model's settings added, if the job has model_sampling. Settings that the job sets itself win.

    Raises JobError naming the key if a value is invalid.
    """
    given = {name: value for name, value in own.settings.items() if name not in job.model_fields_set}
    if not (job.model_sampling and given):
        return job
    try:
        return type(job)(**job.model_dump() | given)
    except ValidationError as error:
        source = f"generation config of {anonymous(job.target)}: "
        raise JobError(*(source + problem(e, None, type(job)) for e in error.errors())) from error


def note(job: Job, own: OwnSettings) -> str | None:
    """One line on what the model's generation config asks for and the job does not do; None if there is nothing.

    job: as it decodes.
    """
    given = job.model_fields_set
    ignored = {n: value for n, value in own.settings.items() if n not in given and getattr(job, n) != value}
    parts = []
    if ignored:
        parts.append(f"exspec ignores the model's generation config: {_listed(ignored)}; --model-sampling uses it")
    if own.unknown:
        parts.append(f"exspec does not support these keys of the model's generation config: {_listed(own.unknown)}")
    return "; ".join(parts) or None


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {reprlib.repr(value)}" for name, value in sorted(settings.items()))
