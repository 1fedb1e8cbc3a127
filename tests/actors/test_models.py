"""Models and pairs that load, and those that are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING, AutoModelForSeq2SeqLM

from exspec.actors.engine import Engine, EngineConfig, Request, RequestError
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.exactness import Waits, check_forward, fix_rotary_factors, limit_context
from exspec.actors.models import load_model, load_pair
from exspec.actors.source import ModelError, Source
from tests import tiny
from tests.tools import families

WORDS = [f"w{i}" for i in range(tiny.VOCABULARY)]
PROMPTS = tiny.prompts(6)


def tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def save(folder: Path, model: Any, words: list[str] = WORDS) -> str:
    model.save_pretrained(folder)
    tokenizer(words).save_pretrained(folder)
    return str(folder)


def greedy(target: Any, draft: Any) -> dict[Any, list[int]]:
    engine = Engine(target, draft, EngineConfig(batch_size=4, capacity=96))
    return tiny.decode(engine, tiny.requests(PROMPTS))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_loads_from_a_folder_and_decodes(tmp_path: Path, family: str) -> None:
    one_layer = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    target, draft = tiny.model(family), tiny.model(family, seed=1, **one_layer)
    pair = load_pair(save(tmp_path / "target", target), save(tmp_path / "draft", draft))
    assert greedy(pair.target, pair.draft) == tiny.greedy(target, PROMPTS)


def test_a_target_loads_in_the_given_dtype_without_a_draft(tmp_path: Path) -> None:
    pair = load_pair(save(tmp_path / "target", tiny.model()), None, dtype=torch.bfloat16)
    assert (pair.target.dtype, pair.draft) == (torch.bfloat16, None)


def mapped_from(file: Path) -> list[range]:
    """The addresses at which this process has mapped a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return [range(*(int(address, 16) for address in line[0].split("-"))) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize(("dtype", "mapped"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_in_the_dtype_of_their_file_are_mapped(tmp_path: Path, dtype: torch.dtype, mapped: bool) -> None:
    """So the actors of a host read a file once, and share its pages on a CPU."""
    model = load_model(Source(save(tmp_path / "target", tiny.model())), dtype)
    ranges = mapped_from(tmp_path / "target" / "model.safetensors")
    assert all(any(p.data_ptr() in there for there in ranges) == mapped for p in model.parameters())


def test_different_vocabularies_are_refused_and_the_first_difference_is_named(tmp_path: Path) -> None:
    target = save(tmp_path / "target", tiny.model())
    other = [*WORDS[:40], "else", *WORDS[41:]]
    with pytest.raises(
        ModelError, match="token 40 is 'w40' in the target and 'else' in the draft; expected a draft of the same"
    ):
        load_pair(target, save(tmp_path / "other", tiny.model(seed=1), other))
    with pytest.raises(ModelError, match="token 50 is 'w50' in the target and None in the draft"):
        load_pair(target, save(tmp_path / "short", tiny.model(seed=1), WORDS[:50]))


def test_a_draft_with_a_padded_embedding_loads(tmp_path: Path) -> None:
    padded = tiny.model(seed=1, vocab_size=tiny.VOCABULARY + 3, num_hidden_layers=1)
    assert load_pair(save(tmp_path / "target", tiny.model()), save(tmp_path / "draft", padded)).draft is not None


def test_a_draft_larger_than_the_target_is_a_warning(tmp_path: Path) -> None:
    large = save(tmp_path / "large", tiny.model(num_hidden_layers=4))
    with pytest.warns(UserWarning, match="is larger than the target .* are target and draft swapped"):
        load_pair(save(tmp_path / "small", tiny.model()), large)


REFUSED = {
    "t5": r"an encoder-decoder model \(t5\)",
    "mamba": "the configuration of mamba has no num_attention_heads",
    "qwen3_next": r"the cache of qwen3_next does not hold the keys and values of every token \(linear_attention\)",
    "gemma4_text": "the layers of gemma4_text have different shapes",
    "llama4_text": r"llama4_text decodes differently in slots than alone \(its logits differ\)",
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_with_other_caches_are_refused(tmp_path: Path, family: str) -> None:
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    folder = save(tmp_path / "model", auto.from_config(families.small(CONFIG_MAPPING[family])))
    with pytest.raises(ModelError, match=f"{REFUSED[family]}.*expected a decoder-only model that holds keys"):
        load_pair(folder, None)


TINY = {k: v for k, v in tiny.FAMILIES["llama"].to_dict().items() if k not in ("model_type", "architectures")}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 40,
    "short_factor": [1.0] * 4, "long_factor": [9.0] * 4,
}  # fmt: skip


def longrope() -> Any:
    torch.manual_seed(0)
    config = Phi3Config(
        **TINY | {"rope_parameters": LONGROPE, "sliding_window": None, "original_max_position_embeddings": 40}
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_context_of_longrope_ends_where_its_factors_change(tmp_path: Path) -> None:
    pair = load_pair(save(tmp_path / "model", longrope()), None)
    assert context_length(pair.target.config) == 40
    rows = [row[:30] for row in tiny.prompts(8)]
    engine = Engine(pair.target, pair.target, EngineConfig(batch_size=4, capacity=40, bucket=40))
    assert tiny.decode(engine, tiny.requests(rows, 10)) == tiny.greedy(longrope(), rows, 10), "as the unchanged model"
    with pytest.raises(RequestError, match="leaves no room in the context of 40"):
        engine.submit(Request(0, [1] * 40))


def test_a_model_whose_rows_depend_on_the_positions_of_others_is_refused() -> None:
    """Without the limit, a row beside a longer one is computed with other factors."""
    with pytest.raises(ModelError, match=r"a row's logits depend on the positions of the rows beside it"):
        check_forward(longrope(), "phi3")


def test_fixed_rotary_factors_do_not_wait_for_the_device() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny.model(rope_parameters=dynamic)

    def waits() -> list[str]:
        ids, mask = torch.arange(8)[None], torch.zeros(1, 1, 8, 8)
        with torch.inference_mode(), Waits() as found:
            model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
        return found.names

    assert waits()
    expected = tiny.generate(model, list(range(30)), 20)
    fix_rotary_factors(model)
    assert waits() == []
    assert tiny.generate(model, list(range(30)), 20) == expected


def test_waits_for_the_device_are_found() -> None:
    x = torch.arange(6)
    with Waits() as waits:
        x[:3].sum()
        x[torch.tensor([0, 1])]
    assert waits.names == []
    with Waits() as waits:
        x[x > 2]
        bool((x > 2).any())
        x.nonzero()
    assert len(waits.names) >= 3
    assert {"index by a mask", "nonzero"} <= set(waits.names)


def test_a_model_that_ignores_positions_is_refused() -> None:
    """No configuration says so; the check runs a prompt through the slots."""

    class Stubborn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.model()
            self.config, self.dtype, self.device = self.model.config, self.model.dtype, self.model.device

        def forward(self, position_ids: Any = None, **options: Any) -> Any:
            return self.model(position_ids=None if position_ids is None else torch.zeros_like(position_ids), **options)

    check_forward(tiny.model(), "honest")
    with pytest.raises(ModelError, match="stubborn: llama decodes differently in slots than alone"):
        check_forward(Stubborn(), "stubborn")  # type: ignore[arg-type]


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such folder; expected a model's folder, or a hub id"):
        load_pair(str(tmp_path / "nowhere"), None)
    with pytest.raises(ModelError, match=r"some/model: cannot be loaded as a model folder or hub id"):
        load_pair("some/model", None)


OWN = """
from collections.abc import Callable
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = {kind!r}
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_code(folder: Path, kind: str, marker: Path) -> str:
    """A model folder with Python code that leaves a mark when it runs."""
    save(folder, tiny.model())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": kind, "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN.format(marker=str(marker), kind=kind))
    return str(folder)


ASK = "import sys; from exspec.actors.models import load_pair; load_pair(sys.argv[1], None)"


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_a_models_code_does_not_run_by_default(tmp_path: Path, kind: str) -> None:
    """Nor does exspec ask on the terminal, where an answer may already wait."""
    marker = tmp_path / "ran"
    folder = with_code(tmp_path / "model", kind, marker)
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", ASK, folder]
    done = subprocess.run(command, input="y\n" * 9, env=environment, capture_output=True, text=True, check=False)
    if kind == "own":
        assert f"ModelError: {folder}: it comes with code of its own; expected" in done.stderr
        assert "trust_remote_code: true" in done.stderr
    else:  # transformers knows the architecture and uses its own code
        assert done.returncode == 0
    assert done.stdout == ""
    assert not marker.exists()


def test_a_models_code_runs_with_trust_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "ran"
    pair = load_pair(Source(with_code(tmp_path / "model", "own", marker), trust_remote_code=True), None)
    assert type(pair.target).__name__ == "OwnModel"
    assert marker.exists()


def test_a_tokenizers_code_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", tiny.model())
    path = tmp_path / "model" / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "model" / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"it comes with code of its own; expected .* or trust_remote_code: true"):
        load_pair(folder, None)


def test_pickled_weights_are_refused_without_allow_pickle(tmp_path: Path) -> None:
    model = tiny.model()
    folder = save(tmp_path / "model", model)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model: .*expected safetensors, or allow_pickle: true"):
        load_model(Source(folder), torch.float32)
    with pytest.raises(ModelError, match="allow_pickle: true"):
        load_pair(save(tmp_path / "other", model), folder)
    source = Source(folder, allow_pickle=True)
    assert load_pair(source, source).draft is not None


def test_the_limited_context_follows_from_the_configuration_alone(tmp_path: Path) -> None:
    """A job plans before it loads weights."""
    save(tmp_path / "model", longrope())
    config = AutoConfig.from_pretrained(tmp_path / "model")
    limit_context(config)
    assert context_length(config) == 40
    other = tiny.model().config
    limit_context(other)
    assert context_length(other) == tiny.CONTEXT
