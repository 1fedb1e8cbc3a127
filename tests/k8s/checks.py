"""All checks of rendered manifests together."""

from tests.k8s import policy, rules, schemas
from tests.k8s.manifests import Manifest


def problems(objects: list[Manifest]) -> list[str]:
    """What the API server, the operators or a platform's policy would refuse."""
    invalid = [f"{item['kind']}: {text}" for item in objects for text in schemas.problems(item)]
    return [*invalid, *rules.problems(objects), *policy.problems(objects)]
