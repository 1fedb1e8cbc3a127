"""Odd model folders: one sentence says what is wrong, and no file of a model runs code."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from httpx2 import ConnectError
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers.integrations import hub_kernels

from exspec.actors.engine.drafters.lookup import drafter_class
from exspec.actors.models import load_model, load_pair
from exspec.actors.source import ModelError, Source
from exspec.pipeline import weights
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from tests import tiny
from tests.actors.engine.drafters.test_heads import save
from tests.pipeline import jobs

Change = Callable[[Path], Any]
TOKENIZER = "its tokenizer cannot be loaded ({}); expected tokenizer.json and tokenizer_config.json beside config.json"
INDEX = "model.safetensors.index.json"


def edit(name: str, /, **values: Any) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def remove(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def index(*files: Any) -> Change:
    """Weights behind an index that names these files."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "whole.safetensors")
        names = {f"t{number}": file for number, file in enumerate(files)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return change


def without_a_layer(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, folder / "model.safetensors", {"format": "pt"}
    )


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("weights")


BROKEN: dict[str, tuple[Change, str]] = {
    "no such folder": (shutil.rmtree, "no such folder; expected a model's folder, or a hub id such as Qwen/Qwen3-8B"),
    "a file": (a_file, "is a file; expected a model's folder, or a hub id"),
    "no config": (remove("config.json"), "the folder has no config.json; expected a model's files"),
    "an empty config": (write("config.json", ""), "config.json' is not a valid JSON file"),
    "a cut config": (cut("config.json"), "config.json' is not a valid JSON file"),
    "a config that is a list": (write("config.json", "[1]"), "config.json is a list; expected a JSON object"),
    "an unknown model": (edit("config.json", model_type="nosuch"), "has model type `nosuch`"),
    "vocab_size too small": (edit("config.json", vocab_size=10), "vocab_size is 10 in config.json, but model.embed_to"),
    "vocab_size too large": (edit("config.json", vocab_size=999), "vocab_size is 999 in config.json, but model.embed_"),
    "vocab_size below 0": (edit("config.json", vocab_size=-4), "vocab_size is -4 in config.json, but model.embed_toke"),
    "vocab_size is text": (edit("config.json", vocab_size="many"), "Field 'vocab_size' expected int, got str"),
    "no heads": (edit("config.json", num_attention_heads=0), "ZeroDivisionError"),
    "an odd width": (edit("config.json", hidden_size=7), "The hidden size (7) is not a multiple"),
    "an unknown dtype": (edit("config.json", dtype="float9"), "no attribute 'float9'"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), TOKENIZER.format("there is none")),
    "an empty tokenizer.json": (write("tokenizer.json", ""), TOKENIZER.split("{")[0]),
    "an empty object as tokenizer": (write("tokenizer.json", "{}"), TOKENIZER.format("KeyError: 'added_tokens'")),
    "a cut tokenizer.json": (cut("tokenizer.json"), "its tokenizer cannot be loaded (Expecting"),
    "an empty tokenizer_config": (write("tokenizer_config.json", ""), "its tokenizer cannot be loaded (Expecting valu"),
    "a tokenizer_config that is a list": (write("tokenizer_config.json", "[]"), "its tokenizer cannot be loaded (Attr"),
    "no weights": (remove("model.safetensors"), "the folder has no weights in safetensors; expected safetensors, or a"),
    "empty weights": (write("model.safetensors", ""), "model.safetensors: cut or damaged (Error while deserializing"),
    "cut weights": (cut("model.safetensors"), "model.safetensors: cut or damaged (Error while deserializing"),
    "weights of text": (write("model.safetensors", "x" * 999), "model.safetensors: cut or damaged (Error while"),
    "an index of an absent file": (index("no.safetensors"), f"no.safetensors is missing, which {INDEX} names"),
    "an index of a pickle": (index("evil.bin"), f"{INDEX} names the file 'evil.bin'; expected safetensors, or allow_p"),
    "an index of a pickle among others": (index("whole.safetensors", "evil.bin"), f"{INDEX} names the file 'evil.bin'"),
    "an index of a file above": (index("../x.safetensors"), "names the file '../x.safetensors'; expected a file of th"),
    "an index of a file elsewhere": (index("/x.safetensors"), "names the file '/x.safetensors'; expected a file of th"),
    "an index of a Windows path": (index("..\\x.safetensors"), "expected a file of the same folder"),
    "an index of a number": (index(3), "names the file 3; expected a file of the same folder"),
    "an index of text": (lambda f: (index()(f), write(INDEX, "x")(f)), f"{INDEX}: not an index of weights (JSONDecode"),
    "an index without files": (lambda f: (index()(f), write(INDEX, "{}")(f)), f"{INDEX}: not an index of weights (Key"),
    "a config that names a pickle": (
        edit("config.json", transformers_weights="adapter_model.bin"),
        "config.json names the file 'adapter_model.bin'; expected safetensors",
    ),
    "a config that names a file above": (
        edit("config.json", transformers_weights="../x.safetensors"),
        "config.json names the file '../x.safetensors'; expected a file of the same folder",
    ),
    "a cut generation config": (write("generation_config.json", "{"), "generation config"),
}  # fmt: skip


@pytest.fixture
def folder(pair: jobs.Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[0], tmp_path / "model"))


def problems(target: str, draft: str | None, place: Path) -> tuple[str, ...]:
    jobs.write_shards(place / "in", rows=2)
    with pytest.raises(JobError) as error:
        prepare(jobs.job((target, draft), place / "in", place / "out", method="exspec"))  # type: ignore[arg-type]
    return error.value.problems


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_one_sentence_before_the_start(
    change: Change,
    message: str,
    folder: Path,
    pair: jobs.Pair,
    tmp_path: Path,
) -> None:
    change(folder)
    (found,) = problems(str(folder), pair[1], tmp_path)
    assert found.startswith(f"target {folder}")
    assert message in found
    assert "\n" not in found


def test_what_is_wrong_with_both_models_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder)
    found = problems(str(folder), str(tmp_path / "nowhere"), tmp_path)
    assert [text.split(":")[0] for text in found] == [f"target {folder}", f"draft {tmp_path / 'nowhere'}"]


def test_missing_tensors_are_not_made_up(folder: Path) -> None:
    """transformers fills them with random numbers."""
    without_a_layer(folder)
    with pytest.raises(
        ModelError, match=r"its files lack model.layers.1.mlp.\w+.weight and 2 more tensors of its config"
    ):
        load_model(Source(str(folder)), torch.float32)


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("change", [index("evil.bin"), edit("config.json", transformers_weights="adapter_model.bin")])
def test_no_pickle_is_opened(change: Change, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with torch's own protection, which has had gaps."""
    change(folder)
    for name in ("evil.bin", "adapter_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    opened: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *arguments, **_: opened.append(arguments))
    with pytest.raises(ModelError, match="expected safetensors, or allow_pickle"):
        load_model(Source(str(folder)), torch.float32)
    assert not opened
    assert not (tmp_path / "mark").exists()


KERNELS = {
    "the present name": {"_attn_implementation": "someone/kernel"},
    "the public name": {"attn_implementation": "someone/kernel:attend"},
    "a paged one": {"attn_implementation": "paged|someone/kernel"},
    "by part": {"attn_implementation": {"": "someone/kernel", "text_config": "someone/kernel"}},
    "the internal name": {"_attn_implementation_internal": "someone/kernel"},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that transformers asks the hub for."""
    names: list[Any] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: names.append(name))
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    return names


@pytest.mark.parametrize("values", KERNELS.values(), ids=KERNELS)
def test_an_attention_on_the_hub_is_ignored(
    values: dict[str, Any],
    folder: Path,
    pair: jobs.Pair,
    asked: list[Any],
) -> None:
    edit("config.json", **values)(folder)
    for target, draft in ((str(folder), pair[1]), (pair[0], str(folder))):
        loaded = load_pair(target, draft)
        assert loaded.draft is not None
        for model in (loaded.target, loaded.draft):
            assert model.config._attn_implementation in ("sdpa", "eager")
    assert asked == []


@pytest.mark.parametrize("drafter", tiny.HEADS)
def test_an_attention_on_the_hub_is_ignored_in_a_head(drafter: str, tmp_path: Path, asked: list[Any]) -> None:
    target = tiny.model()
    folder = save(drafter, target, tmp_path / "head")
    for values in KERNELS.values():
        edit("config.json", **values)(folder)
        drafter_class(drafter).load(folder, torch.float32, "cpu", False)  # type: ignore[attr-defined]
    assert asked == []


def unreachable(*_: Any, **__: Any) -> None:
    raise ConnectError("[Errno -2] Name or service not known")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The hub cannot be reached, and the user has not said so. Lists the requests that would be retried."""
    tried: list[str] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(weights, "OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)

    def ask(method: str, url: str, **_: Any) -> None:
        tried.append(f"{method} {url}")
        unreachable()

    monkeypatch.setattr("huggingface_hub.utils._http._http_backoff_base", ask)
    return tried


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8b-mistyped", "models/mistyped", "mistyped"])
def test_a_mistyped_name_fails_at_once_without_a_network(
    name: str,
    pair: jobs.Pair,
    tmp_path: Path,
    no_network: list[str],
) -> None:
    (found,) = problems(name, pair[1], tmp_path)
    assert found == (
        f"target {name}: no such folder, not in the local cache of the hub, and the hub cannot be reached "
        "([Errno -2] Name or service not known); correct the name, or connect to the hub"
    )
    assert no_network == []


def test_a_cached_model_works_without_a_network(
    pair: jobs.Pair,
    tmp_path: Path,
    no_network: list[str],
) -> None:
    """Files that are optional, and not in the cache, are not asked for."""
    commit = "0" * 40
    shutil.copytree(pair[0], tmp_path / "cache" / "models--some--model" / "snapshots" / commit)
    references = tmp_path / "cache" / "models--some--model" / "refs"
    references.mkdir()
    (references / "main").write_text(commit)
    job = jobs.job(("some/model", pair[1]), tmp_path / "in", tmp_path / "out")
    jobs.write_shards(tmp_path / "in", rows=2)
    assert prepare(job).job.target_revision == commit
    assert no_network == []
