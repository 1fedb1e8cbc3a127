"""All that decides the output of a job, and what may change between its runs."""

from typing import Any

from exspec.pipeline.job.settings import Job, defaults, settings

CONTENT = " (content)"  # behind a model's setting: what the model holds, its digest or commit


def fingerprint(job: Job, models: dict[str, str], device: str | None = None) -> dict[str, Any]:
    """All that decides the output, by key. models: the digests of the model folders, or commits.

    device: the kind of device that decodes, cpu or cuda; None where that is not known.
    """
    functions = {name: function.identity for name, function in job.functions.items()}
    keys = job.published() | functions | {f"{name}{CONTENT}": digest for name, digest in models.items()}
    decided = {key: value for key, value in keys.items() if not may_change(key, job.exact)}
    return decided | ({"device": device} if device else {})


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what two fingerprints differ, a sentence each: `before` is stored, perhaps by another version, `now` is ours.

    A setting that one of them lacks has its default there. What decides no token is left out even where it is stored.
    A setting that this version does not know comes from another version: where it is off (null, false or empty) it did
    nothing, and anything else may have decided tokens in a way that cannot be repeated here. What was measured (models
    and device) is compared where both have it.
    """
    exact = before.get("exact", True) or now.get("exact", True)  # where they differ in that, it is told itself
    found = []
    for key in sorted(before | now):
        decides = key == "device" or not may_change(key, exact)  # the device's kind, not the setting of that name
        one, other = _value(before, key), _value(now, key)
        if decides and (_differ(one, other) if _is_measured(key) else one != other):
            found.append(f"{key} was {one!r} and is {other!r}")
    return found


def _value(keys: dict[str, Any], key: str) -> Any:
    """The key's value: a setting's default where it is missing; None where a setting that is not known is off."""
    if _is_measured(key):
        return keys.get(key)
    known = defaults()
    return keys.get(key, known[key]) if key in known else keys.get(key) or None


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two digests, commits or devices are known and not the same."""
    return None not in (one, other) and one != other


def may_change(key: str, exact: bool) -> bool:
    """Whether a setting may change between the runs of a job, and with one that names a model what that holds."""
    field = settings().get(key.removesuffix(CONTENT))
    later = field.json_schema_extra["later"] if field else "the same"
    return later == "any" or (later == "any if exact" and exact)


def _is_measured(key: str) -> bool:
    return key == "device" or key.endswith(CONTENT)
