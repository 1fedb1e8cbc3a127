"""What decides the output of a job, and what may change between its runs."""

from typing import Any

from exspec.actors.engine.config import EngineConfig
from exspec.pipeline.job.kinds import DEFAULTS, SETTINGS
from exspec.pipeline.job.settings import Job

CONTENT = " (content)"  # after the name of a model's setting: the digest or commit of the model


def fingerprint(job: Job, models: dict[str, str], device: str | None = None) -> dict[str, Any]:
    """Everything that decides the output, by key.

    models: digests or commits of the models. device: cpu or cuda; None if not known yet.
    """
    functions = {name: function.identity for name, function in job.functions.items()}
    keys = job.published() | functions | {f"{name}{CONTENT}": digest for name, digest in models.items()}
    keys |= {"embeds": True} if job.embeds else {}  # the settings of other kinds of jobs already differ
    decided = {key: value for key, value in keys.items() if not may_change(key, job.exact)}
    return decided | ({"device": device} if device else {})


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two fingerprints, a sentence each. Another version may have written `before`.

    A setting that one of the two lacks has its default there. Settings that decide no token are ignored. A setting that
    this version does not know counts unless it is off (null, false or empty). Models and device are compared if both
    fingerprints have them.
    """
    exact = before.get("exact", True) or now.get("exact", True)  # a difference in `exact` itself is reported anyway
    found = []
    for key in sorted(before | now):
        decides = key == "device" or not may_change(key, exact)  # the kind of device, not the setting `device`
        one, other = _value(before, key), _value(now, key)
        comparable = not _is_measured(key) or None not in (one, other)
        if decides and comparable and one != other:
            found.append(f"{key} was {one!r} and is {other!r}")
    return found


def cures(before: dict[str, Any], now: dict[str, Any], config: EngineConfig, capacity: int) -> dict[str, Any]:
    """The settings that differ between two fingerprints and change error rows only, with their values now.

    config: the stored shape. capacity: in tokens, of the present settings. Rows that are done cannot change by

    - `truncate_prompt`, turned on: it cuts a prompt only if the row would be rejected otherwise.
    - `capacity`, raised: a row that is done fitted the old capacity, so its prompt and its completion have the same
      limits. Shapes are fixed, so only their KV columns could change a token. Those are whole buckets, or whole prompt
      chunks, up to the capacity; the old capacity has to be a multiple of both, so none was cut short by it. With more
      room a prompt that was cut would be cut less, so the old settings must not cut.
    """
    cut = _value(before, "truncate_prompt")
    found = {"truncate_prompt": True} if _value(now, "truncate_prompt") and not cut else {}
    whole = not any(config.capacity % columns for columns in (config.bucket, config.prefill_columns))
    longer = capacity >= config.capacity and _value(now, "capacity") != _value(before, "capacity")
    return found | (
        {"capacity": _value(now, "capacity")} if longer and whole and config.fixed_shapes and not cut else {}
    )


def may_change(key: str, exact: bool) -> bool:
    """Whether a setting, or the content of a model, may change between the runs of a job."""
    field = SETTINGS.get(key.removesuffix(CONTENT))
    later = field.json_schema_extra["later"] if field else "the same"  # type: ignore[index]
    return later == "any" or (later == "any if exact" and exact)


def _value(keys: dict[str, Any], key: str) -> Any:
    """The value of a key: the default if it is missing; None if the setting is unknown and off."""
    if _is_measured(key):
        return keys.get(key)
    return keys.get(key, DEFAULTS[key]) if key in DEFAULTS else keys.get(key) or None


def _is_measured(key: str) -> bool:
    return key == "device" or key.endswith(CONTENT)
