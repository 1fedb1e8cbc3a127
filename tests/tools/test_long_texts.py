"""The long texts, and the drafters on them."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import long_texts
from tests.tools.long_texts import DEFINITION, EACH, SLOT, SLOTS, VALUE, VALUES, WORD


@pytest.mark.parametrize("length", [300, 2000])
def test_each_value_is_the_one_that_was_defined(length: int) -> None:
    text = long_texts.text_of(length, length // 2, random.Random(0))
    defined = [(token - DEFINITION) // VALUES for token in text if DEFINITION <= token < SLOT]
    values = {(t - DEFINITION) // VALUES: (t - DEFINITION) % VALUES for t in text if DEFINITION <= t < SLOT}
    assert sorted(defined) == list(range(SLOTS)), "once each"
    told = [(slot - SLOT, value - VALUE) for slot, value in pairwise(text) if SLOT <= slot < VALUE]
    assert len(told) > EACH
    assert all(values[slot] == value for slot, value in told)
    assert sum(token >= WORD for token in text) > length / 8


@pytest.mark.parametrize("role", long_texts.SIZES)
@torch.inference_mode()
def test_a_model_recalls_before_it_is_trained(role: str) -> None:
    model = long_texts.untrained(role)
    text = long_texts.text_of(1500, 700, random.Random(1))
    chosen = model(input_ids=torch.tensor([text])).logits[0, :, VALUE:WORD].argmax(-1) + VALUE
    asked = [i for i, token in enumerate(text[:-1]) if SLOT <= token < VALUE]
    right = sum(int(chosen[i]) == text[i + 1] for i in asked) / len(asked)
    assert right > 0.9, "an eighth would be luck"


def test_texts_of_mixed_lengths() -> None:
    assert sorted(map(len, long_texts.prompts_of("300*2+700"))) == [300] * 16 + [700] * 8
    for text in long_texts.prompts_of("1500!"):
        assert {DEFINITION <= token < SLOT for token in text[:-200]} == {False}
        assert sum(DEFINITION <= token < SLOT for token in text) == SLOTS


@pytest.mark.rare
def test_drafters_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All give the tokens of plain decoding."""
    monkeypatch.setattr(long_texts, "ROWS", 2)
    monkeypatch.setattr(long_texts, "NEW", 64)
    for role in long_texts.SIZES:
        long_texts.untrained(role).save_pretrained(tmp_path / role)
    figures = tmp_path / "figures.jsonl"
    names = [*long_texts.DRAFTERS, *long_texts.LATER, *long_texts.AUTO]
    shape: Any = {"turns": 1, "kernels": "eager", "threads": 1, "tune_seconds": 5.0}
    long_texts.measure(tmp_path, figures, "1400", drafters=";".join(names), **shape)
    found = {line["drafter"]: line for line in map(json.loads, figures.read_text().splitlines())}
    assert list(found) == names
    assert all(line["times_plain"] > 0 for line in found.values())
    long_texts.draw(figures, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
