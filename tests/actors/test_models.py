"""Pairs that load, pairs that are refused, and stop strings."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    T5Config,
)
from transformers.models.auto import AutoModelForSeq2SeqLM

from exspec.actors.engine import Engine, EngineConfig, Request, RequestError, StopCheck
from exspec.actors.engine.kv.cached_model import context_length
from exspec.actors.exactness import ModelError, Waits, check_config, check_forward, fix_rotary_factors, limit_context
from exspec.actors.models import load_model, load_pair
from exspec.actors.stop_strings import StopStrings
from tests import tiny

WORDS = [f"w{i}" for i in range(tiny.VOCABULARY)]


def tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def save(folder: Path, model: Any, words: list[str] = WORDS) -> str:
    model.save_pretrained(folder)
    tokenizer(words).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_loads_from_a_folder_and_decodes(tmp_path: Path, family: str) -> None:
    target, draft = (
        tiny.model(family),
        tiny.model(family, seed=1, **({"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1})),
    )
    pair = load_pair(save(tmp_path / "target", target), save(tmp_path / "draft", draft))
    rows = tiny.prompts(6)
    engine = Engine(pair.target, pair.draft, EngineConfig(batch_size=4, capacity=96))
    assert tiny.decode(engine, tiny.requests(rows)) == {i: tiny.generate(target, row, 20) for i, row in enumerate(rows)}


def test_the_dtype_and_a_missing_draft(tmp_path: Path) -> None:
    pair = load_pair(save(tmp_path / "target", tiny.model()), None, dtype=torch.bfloat16)
    assert (pair.target.dtype, pair.draft) == (torch.bfloat16, None)


def test_different_vocabularies_are_refused_by_the_first_token_that_differs(tmp_path: Path) -> None:
    target = save(tmp_path / "target", tiny.model())
    other = [*WORDS[:40], "else", *WORDS[41:]]
    with pytest.raises(
        ModelError, match="token 40 is 'w40' in the target and 'else' in the draft; expected a draft of the same"
    ):
        load_pair(target, save(tmp_path / "other", tiny.model(seed=1), other))
    with pytest.raises(ModelError, match="token 50 is 'w50' in the target and None in the draft"):
        load_pair(target, save(tmp_path / "short", tiny.model(seed=1), WORDS[:50]))


def test_a_padded_embedding_alone_is_fine(tmp_path: Path) -> None:
    padded = tiny.model(seed=1, vocab_size=tiny.VOCABULARY + 3, num_hidden_layers=1)
    assert load_pair(save(tmp_path / "target", tiny.model()), save(tmp_path / "draft", padded)).draft is not None


def test_a_draft_larger_than_the_target_is_a_warning(tmp_path: Path) -> None:
    large = save(tmp_path / "large", tiny.model(num_hidden_layers=4))
    with pytest.warns(UserWarning, match="is larger than the target .* were they given in the wrong order"):
        load_pair(save(tmp_path / "small", tiny.model()), large)


TINY = {k: v for k, v in tiny.FAMILIES["llama"].to_dict().items() if k not in ("model_type", "architectures")}
REFUSED: dict[str, tuple[Any, Any]] = {
    r"an encoder-decoder model \(t5\)": (
        AutoModelForSeq2SeqLM,
        T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
    ),
    r"the configuration of mamba has no num_attention_heads": (
        AutoModelForCausalLM,
        MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4),
    ),
    r"the cache of qwen3_next does not hold the keys and values of every token \(linear_attention\)": (
        AutoModelForCausalLM,
        Qwen3NextConfig(
            **TINY | {"num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
            shared_expert_intermediate_size=8, linear_num_value_heads=2, linear_num_key_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        ),
    ),
    r"the layers of gemma4_text have different shapes": (
        AutoModelForCausalLM,
        Gemma4TextConfig(
            **TINY | {"head_dim": 8, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
            sliding_window=16, vocab_size_per_layer_input=61, hidden_size_per_layer_input=8,
        ),
    ),
    r"llama4_text does not decode the same by slots as on its own \(its logits differ\)": (
        AutoModelForCausalLM,
        Llama4TextConfig(
            **TINY | {"head_dim": 8, "rope_parameters": None}, intermediate_size_mlp=64, num_local_experts=2,
            attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_other_caches_are_refused_with_what_would_work(tmp_path: Path, reason: str) -> None:
    auto, config = REFUSED[reason]
    folder = save(tmp_path / "model", auto.from_config(config))
    with pytest.raises(ModelError, match=f"{reason}.*expected a decoder-only model that holds keys"):
        load_pair(folder, None)


WINDOWS: dict[str, Any] = {
    "mistral": MistralConfig(**TINY | {"sliding_window": 16}),
    "gemma2": Gemma2Config(**TINY | {"sliding_window": 16, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": Gemma3TextConfig(**TINY | {"num_hidden_layers": 6, "sliding_window": 16, "head_dim": 8}),
}


def refusal(model: Any) -> str:
    """Why a model is refused; empty where it is not."""
    try:
        check_forward(model, "model")
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_and_soft_caps_are_exact_or_refused_by_the_few_tokens_of_the_check(family: str) -> None:
    """The check's tokens fit the window, and it must find out all the same."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(WINDOWS[family]).eval()
    before = model.config.sliding_window
    reason = refusal(model)
    if reason:
        assert "its logits differ" in reason or "softcap is not supported" in reason
    else:
        rows = tiny.prompts(6)
        engine = Engine(model, model, EngineConfig(batch_size=4, capacity=96))
        found = tiny.decode(engine, tiny.requests(rows))
        assert found == {i: tiny.generate(model, row, 20) for i, row in enumerate(rows)}
    assert model.config.sliding_window == before == 16, "the model stays as it is"


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


def test_with_factors_that_depend_on_the_longest_row_the_context_ends_where_they_change(tmp_path: Path) -> None:
    pair = load_pair(save(tmp_path / "model", longrope()), None)
    assert context_length(pair.target.config) == 40
    rows = [row[:30] for row in tiny.prompts(8)]
    engine = Engine(pair.target, pair.target, EngineConfig(batch_size=4, capacity=40, bucket=40))
    found = tiny.decode(engine, tiny.requests(rows, 10))
    assert found == {i: tiny.generate(longrope(), row, 10) for i, row in enumerate(rows)}, "of a model left as it was"
    with pytest.raises(RequestError, match="leaves no room in the context of 40"):
        engine.submit(Request(0, [1] * 40))


def test_rows_that_depend_on_the_positions_of_others_are_found() -> None:
    """The same model as transformers has it: a row beside one past the point is computed with other factors."""
    with pytest.raises(ModelError, match=r"a row's logits depend on the positions of the rows beside it"):
        check_forward(longrope(), "phi3")


def test_settled_positions_wait_for_no_device() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny.model(rope_parameters=dynamic)

    def waits() -> list[str]:
        ids, mask = torch.arange(8)[None], torch.zeros(1, 1, 8, 8)
        with torch.inference_mode(), Waits() as found:
            model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
        return found.found

    assert waits()
    expected = tiny.generate(model, list(range(30)), 20)
    fix_rotary_factors(model)
    assert waits() == []
    assert tiny.generate(model, list(range(30)), 20) == expected


def test_a_wait_is_found_by_its_operation() -> None:
    x = torch.arange(6)
    with Waits() as waits:
        x[:3].sum()
        x[torch.tensor([0, 1])]
    assert waits.found == []
    with Waits() as waits:
        x[x > 2]
        bool((x > 2).any())
        x.nonzero()
    assert len(waits.found) >= 3
    assert {"index by a mask", "nonzero"} <= set(waits.found)


def test_a_model_that_counts_its_own_positions_is_refused() -> None:
    """What no configuration tells is found by running a prompt through the slots."""

    class Stubborn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.model()
            self.config, self.dtype, self.device = self.model.config, self.model.dtype, self.model.device

        def forward(self, position_ids: Any = None, **options: Any) -> Any:
            return self.model(position_ids=None if position_ids is None else torch.zeros_like(position_ids), **options)

    check_forward(tiny.model(), "honest")
    with pytest.raises(ModelError, match="stubborn: llama does not decode the same by slots as on its own"):
        check_forward(Stubborn(), "stubborn")  # type: ignore[arg-type]


def test_supported_configurations_pass() -> None:
    for name, config in tiny.FAMILIES.items():
        check_config(config, name)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: cannot be loaded as a model folder or hub id"):
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
    """A model that comes with code of its own, which leaves a mark where it runs."""
    save(folder, tiny.model())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": kind, "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN.format(marker=str(marker), kind=kind))
    return str(folder)


ASK = "import sys; from exspec.actors.models import load_pair; load_pair(sys.argv[1], None)"


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_code_of_a_model_never_runs_unless_the_job_says_so(tmp_path: Path, kind: str) -> None:
    """Nobody is asked on the terminal, where an answer may already wait."""
    marker = tmp_path / "ran"
    folder = with_code(tmp_path / "model", kind, marker)
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", ASK, folder]
    done = subprocess.run(command, input="y\n" * 9, env=environment, capture_output=True, text=True, check=False)
    if kind == "own":
        assert f"ModelError: {folder}: it comes with code of its own; expected" in done.stderr
        assert "trust_remote_code: true" in done.stderr
    else:  # transformers knows the architecture, and takes its own code for it
        assert done.returncode == 0
    assert done.stdout == ""
    assert not marker.exists()


def test_code_of_a_model_runs_where_the_job_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "ran"
    pair = load_pair(with_code(tmp_path / "model", "own", marker), None, trust_remote_code=True)
    assert type(pair.target).__name__ == "OwnModel"
    assert marker.exists()


def test_code_of_a_tokenizer_is_refused_too(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", tiny.model())
    path = tmp_path / "model" / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "model" / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"it comes with code of its own; expected .* or trust_remote_code: true"):
        load_pair(folder, None)


def test_weights_that_can_run_code_are_refused_unless_the_job_says_so(tmp_path: Path) -> None:
    model = tiny.model()
    folder = save(tmp_path / "model", model)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model: .*expected safetensors, or allow_pickle: true"):
        load_model(folder, torch.float32)
    with pytest.raises(ModelError, match="allow_pickle: true"):
        load_pair(save(tmp_path / "other", model), folder)
    assert load_pair(folder, folder, allow_pickle=True).draft is not None


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens cut across words and characters: bytes, and a few longer pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["ST", "OP", "ab", "a.b", "\u0120\u0120"]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *pieces])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def ids(tokenizer_: Any, pieces: list[str]) -> list[int]:
    return [tokenizer_.convert_tokens_to_ids(piece) for piece in pieces]


def hits(stop: Callable[[], StopCheck], tokens: list[int]) -> list[str | None]:
    check = stop()
    return [check(token) for token in tokens]


def first_hit(stop: StopStrings, tokens: list[int]) -> int | None:
    return next((n for n, hit in enumerate(hits(stop, tokens), 1) if hit is not None), None)


def test_a_stop_string_may_span_tokens_or_lie_inside_one(characters: Any) -> None:
    spread = ids(characters, ["a", "b", "ST", "OP", "a"])
    assert first_hit(StopStrings(characters, ["STOP"]), spread) == 4
    assert first_hit(StopStrings(characters, ["bS"]), spread) == 3
    assert StopStrings(characters, ["bS"]).cut(spread[:3]) == "a"
    assert first_hit(StopStrings(characters, ["."]), ids(characters, ["ab", "a.b", "a"])) == 2
    assert StopStrings(characters, ["."]).cut(ids(characters, ["ab", "a.b"])) == "aba"


def test_a_stop_string_is_found_however_far_into_the_completion(characters: Any) -> None:
    check = StopStrings(characters, ["STOP", "end"])
    tokens = ids(characters, ["a", "b"] * 500 + ["ST", "OP"])
    assert first_hit(check, tokens) == 1002
    assert hits(check, tokens)[-1] == "STOP"
    assert check.cut(tokens) == "ab" * 500


def test_special_tokens_between_do_not_hide_a_stop_string(characters: Any) -> None:
    end = characters.convert_tokens_to_ids("<end>")
    tokens = [*ids(characters, ["a", "ST"]), *[end] * 60, *ids(characters, ["OP"])]
    assert hits(StopStrings(characters, ["STOP"]), tokens)[-1] == "STOP"


def test_characters_of_several_bytes(characters: Any) -> None:
    pieces = [
        characters.backend_tokenizer.decoder and p for p in "\u00e2\u0124\u00ac"
    ]  # the three bytes of the euro sign
    tokens = ids(characters, ["a", *pieces])
    assert characters.decode(tokens) == "a€"
    assert first_hit(StopStrings(characters, ["€"]), tokens) == 4


def test_the_string_that_begins_first_wins(characters: Any) -> None:
    check = StopStrings(characters, ["b", "ab", "aba"])
    tokens = ids(characters, ["ST", "a", "b"])
    assert hits(check, tokens)[-1] == "ab"
    assert check.cut(tokens) == "ST"


def test_a_string_that_is_complete_too_early_does_not_count(characters: Any) -> None:
    check = StopStrings(characters, ["STOP"], least=6)
    tokens = ids(characters, ["a", "ST", "OP", "a", "ST", "OP", "b"])
    assert first_hit(check, tokens) == 6, "the first that counts is complete with the least token"
    assert check.cut(tokens[:6]) == "aSTOPa"
    assert first_hit(StopStrings(characters, ["STOP"], least=3), tokens) == 3
    assert StopStrings(characters, ["STOP"], least=9).cut(tokens) == "aSTOPaSTOPb"


@pytest.mark.parametrize("strings", [[], [""], ["x", ""]])
def test_empty_stop_strings_are_refused(characters: Any, strings: list[str]) -> None:
    with pytest.raises(ValueError, match="stop: expected one or more strings, none of them empty"):
        StopStrings(characters, strings)


def test_the_engine_stops_at_a_string() -> None:
    """End to end: the completion's tokens end with the one that completed the string, and nothing more is counted."""
    words = tokenizer()
    target = tiny.model(eos_token_id=None)
    prompt = [3, 4]
    free = tiny.generate(target, prompt, 20)
    text = words.decode(free)
    string = text[len(text) // 2 : len(text) // 2 + 5]
    check = StopStrings(words, [string])
    engine = tiny.engine(target, draft=tiny.model(seed=1, eos_token_id=None))
    engine.submit(Request(0, prompt, max_new_tokens=20, stop=check))
    (done,) = engine.run()
    assert done.tokens == free[: len(done.tokens)]
    assert (done.finish_reason, done.stopped_by) == ("stop", string)
    assert string in words.decode(done.tokens)
    assert string not in words.decode(done.tokens[:-1])
    assert check.cut(done.tokens) == text[: text.index(string)]
    assert done.statistics.completion_tokens == len(done.tokens) < 20


def test_the_limited_context_is_known_before_weights_are_loaded(tmp_path: Path) -> None:
    """A job plans with it, from the configuration alone."""
    save(tmp_path / "model", longrope())
    config = AutoConfig.from_pretrained(tmp_path / "model")
    limit_context(config)
    assert context_length(config) == 40
    other = tiny.model().config
    limit_context(other)
    assert context_length(other) == tiny.CONTEXT
