"""Where a model comes from, and how a part of it is loaded. A reader imports this for the tokenizer, without models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils._validators import validate_repo_id
from transformers import AutoConfig, AutoTokenizer

from exspec.actors.engine.faults import first_line

FILES = "tokenizer.json and tokenizer_config.json beside config.json, as save_pretrained writes them"
PICKLED = "expected safetensors, or allow_pickle: true for weights in files that can run code"
REFUSED_CODE = "expected a model that transformers itself knows, or trust_remote_code: true to run that code"


class ModelError(ValueError):
    """The engine cannot use this model or pair. The message says why, and what would work."""


@dataclass(frozen=True)
class Source:
    """A model by hub id or folder.

    trust_remote_code: run Python code that comes with it. allow_pickle: load weights that are not safetensors. adapter:
    the folder of a LoRA adapter to merge into its weights. adapters: folders of adapters, of which a row may use one.
    head: whether to load the output head; the files of an embedding model may lack it.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    adapter: str | None = None
    adapters: tuple[str, ...] = ()
    head: bool = True


def load_part(loader: Any, source: Source, **options: Any) -> Any:
    """Load a hub id or folder with one of transformers' Auto classes. Raises ModelError naming the hub id or folder.

    Without trust_remote_code, a model that needs its own code is rejected without a question on the terminal. The
    attention that a configuration asks for is ignored: it may name code on the hub, and the engine has its own.
    """
    check_name(source.name)
    try:
        loaded = loader.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code, **options
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries raise errors of many types for broken files
        raise ModelError(f"{source.name}: {failure(error, loader, options)}") from error
    if loader is AutoConfig:
        loaded._attn_implementation = None
    return loaded


def check_name(name: str) -> None:
    """Raise ModelError unless the name is a model's folder, or may be a hub id."""
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"{name}: the folder has no config.json; expected a model's files")
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = "is a file" if Path(name).exists() else "no such folder"
        raise ModelError(f"{name}: {reason}; expected a model's folder, or a hub id such as Qwen/Qwen3-8B") from error


def failure(error: Exception, loader: Any, options: dict[str, Any]) -> str:
    """Why a loader could not load a part with these options, and what would work."""
    if "trust_remote_code" in str(error):
        return f"it comes with code of its own; {REFUSED_CODE}"
    reason = first_line(error)
    if isinstance(error, StrictDataclassError):  # the first line names the field, the next ones what is wrong
        reason = " ".join(str(error).split())
    elif not isinstance(error, (OSError, ValueError)):
        reason = f"{type(error).__name__}: {reason}"
    if loader is AutoTokenizer:
        reason = "there is none" if "backend tokenizer" in reason else reason
        return f"its tokenizer cannot be loaded ({reason}); expected {FILES}"
    if "ignore_mismatched_sizes" in reason:
        reason = "its tensors have other shapes than config.json asks for; copy the model again"
    reason = f"cannot be loaded as a model folder or hub id: {reason}"
    return f"{reason}; {PICKLED}" if options.get("use_safetensors") and "safetensors" in str(error) else reason
