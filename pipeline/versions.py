"""The packages on which tokens depend. A host of a job needs those of its driver."""

import os
from importlib.metadata import version

from exspec.pipeline.errors import JobError

PACKAGES = "torch", "transformers", "tokenizers"


def versions() -> str:
    """Those of this host. A build for another device is no other version. Imports none of them."""
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)


def check_versions(expected: str) -> None:
    """Raises JobError if this host has others than the driver."""
    if (here := versions()) != expected:
        raise JobError(
            f"{os.uname().nodename} has {here}, the driver has {expected}, and tokens may differ; install the driver's "
            "versions there, or remove the node"
        )
