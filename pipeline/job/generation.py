"""What a model's generation config asks for beside the likeliest tokens, as settings of a job."""

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from transformers import GenerationConfig, PretrainedConfig

from exspec.actors.exactness import ModelError
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job, problem
from exspec.pipeline.secrets import anonymous

J = TypeVar("J", bound=Job)
# What `generate` of transformers takes where a config samples and does not say.
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
# What takes part in choosing tokens and the engine does not have, with the values that do nothing.
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": (None, []),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, []),
    "watermarking_config": (None,),
}
UNKNOWN_SAMPLED: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "top_h": (None,),
    "typical_p": (None, 1),
}
LIMITS = ("min_new_tokens", "bad_words_ids")  # settings that a labeling job has no use for


@dataclass(frozen=True)
class OwnSettings:
    """What a model's generation config asks for.

    settings: of a job, by name. unknown: by the config's keys, what the engine does not have.
    """

    settings: dict[str, Any]
    unknown: dict[str, Any]

    def without_limits(self) -> "OwnSettings":
        """The same for a job whose answers tell which tokens may come."""
        limits = {name: value for name, value in self.settings.items() if name in LIMITS}
        kept = {name: value for name, value in self.settings.items() if name not in LIMITS}
        return OwnSettings(kept, self.unknown | limits)


def load_generation_config(
    place: str, revision: str | None, config: PretrainedConfig, trust_remote_code: bool
) -> GenerationConfig:
    """The generation config of a model in a folder or behind a hub id; where it has none, what its configuration says,
    as transformers itself does it. Raises ModelError where it is wrong in itself."""
    try:
        return GenerationConfig.from_pretrained(place, revision=revision or "main", trust_remote_code=trust_remote_code)
    except OSError as error:  # transformers has no other name for a file that is not there
        if (Path(place) / "generation_config.json").exists():
            raise ModelError(f"{place}: generation config: {str(error).splitlines()[0]}") from error
        return GenerationConfig.from_model_config(config)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{place}: generation config: {error}") from error


def own_settings(config: GenerationConfig) -> OwnSettings:
    """What a generation config asks for that no job asks for by default."""
    asked: dict[str, Any] = {name: getattr(config, name, None) for name in ("repetition_penalty", "min_new_tokens")}
    unknown = dict(UNKNOWN)
    if config.do_sample:
        asked |= {name: _or(getattr(config, name, None), default) for name, default in SAMPLED.items()}
        unknown |= UNKNOWN_SAMPLED
    asked["bad_words_ids"] = _barred(config)
    found = {name: getattr(config, name, None) for name in unknown}
    return OwnSettings(
        {name: value for name, value in asked.items() if value not in (None, Job.model_fields[name].default)},
        {name: value for name, value in found.items() if value not in unknown[name]},
    )


def _barred(config: GenerationConfig) -> list[list[int]]:
    """Sequences of tokens that never come. An end token alone is none, as in transformers, unless it is suppressed."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    alone = [[token] for token in ends]
    words = [list(word) for word in getattr(config, "bad_words_ids", None) or [] if list(word) not in alone]
    suppressed = [[token] for token in getattr(config, "suppress_tokens", None) or []]
    return words + [word for word in suppressed if word not in words]


def with_own(job: J, own: OwnSettings) -> J:
    """The job with the model's own settings where it asks for them and says nothing else itself.

    Raises JobError naming the key whose value a job cannot have.
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
    """What the model's generation config asks for and the job does not do, in one line; None where there is nothing.

    job: as it decodes.
    """
    ignored = {
        name: value
        for name, value in own.settings.items()
        if name not in job.model_fields_set and getattr(job, name) != value
    }
    unknown = f"exspec does not have {_listed(own.unknown)}" if own.unknown else ""
    if ignored:
        told = f"the model's own generation settings are not used: {_listed(ignored)}; --model-sampling uses them"
        return f"{told}; {unknown}" if unknown else told
    return f"the model's own generation settings are not all used: {unknown}" if unknown else None


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {reprlib.repr(value)}" for name, value in sorted(settings.items()))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
