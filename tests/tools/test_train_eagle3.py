"""A trained EAGLE-3 head drafts what its target generates."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from exspec.actors.engine import Engine, EngineConfig, Request, SequenceStatistics
from exspec.actors.models import load_pair
from exspec.jobs.demo import TARGET
from exspec.jobs.demo.messages import examples
from tests.tools import train_eagle3


@pytest.mark.slow
def test_a_head_that_is_trained_for_a_minute_is_accepted(tmp_path: Path) -> None:
    train_eagle3.main(tmp_path / "head", minutes=1000, steps=60)
    pair = load_pair(str(TARGET), str(tmp_path / "head"), torch.float32)
    engine = Engine(pair.target, pair.draft, EngineConfig(drafter="eagle3", draft_tokens=3, capacity=1024))
    for i, example in enumerate(islice(examples(seed=77), 16)):
        text = f"<|message|>{example.message}<|record|>"
        engine.submit(Request(i, pair.tokenizer(text)["input_ids"], max_new_tokens=60))
    total = sum((c.statistics for c in engine.run()), start=SequenceStatistics())
    assert total.acceptance_rate > 0.15, "an untrained head has less than 0.01"
