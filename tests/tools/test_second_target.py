"""The second target, and the prompts for it."""

from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tools import second_target


def test_a_target_and_prompts_that_it_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list(islice(second_target.functions(), 80))
    monkeypatch.setattr(second_target, "functions", lambda: iter(texts))
    monkeypatch.setattr(second_target, "PROMPTS", 16)
    learned: list[str] = []
    build = second_target.bpe
    monkeypatch.setattr(second_target, "bpe", lambda given, *rest: (learned.extend(given), build(given, *rest))[1])
    second_target.main(tmp_path, 0.001)
    prompts = [text for file in (tmp_path / "in").iterdir() for text in pq.read_table(file)["prompt"].to_pylist()]
    assert len(prompts) == 16
    begun = {"\n".join(text.splitlines()[:2]) for text in set(texts) - set(learned)}
    assert set(prompts) == begun
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert tokenizer.decode(tokenizer(prompts[0])["input_ids"]) == prompts[0]
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id
