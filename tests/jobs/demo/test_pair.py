"""The demo pair does what it was trained for."""

import json
from itertools import islice

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from exspec.actors.engine import Engine, EngineConfig, Request, SequenceStatistics
from exspec.actors.models import load_pair
from exspec.jobs.demo import DRAFT, PAIR, TARGET
from exspec.jobs.demo.messages import examples


def test_it_is_small_and_loads_with_plain_transformers() -> None:
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 16_000_000
    target, draft = (AutoModelForCausalLM.from_pretrained(folder).num_parameters() for folder in (TARGET, DRAFT))
    assert 4_000_000 <= target <= 8_000_000
    assert draft <= target / 7
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|message|>Hi<|record|>"


def test_it_turns_messages_it_never_saw_into_records() -> None:
    """At least nine fields of ten, and drafts that are neither useless nor perfect."""
    pair = load_pair(str(TARGET), str(DRAFT), torch.float32)
    held_out = list(islice(examples(seed=77), 60))
    engine = Engine(pair.target, pair.draft, EngineConfig(batch_size=16, capacity=1024))
    for i, example in enumerate(held_out):
        text = f"<|message|>{example.message}<|record|>"
        engine.submit(Request(i, pair.tokenizer(text)["input_ids"], max_new_tokens=400))
    right, completions = 0, engine.run()
    for completion in completions:
        text = pair.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        expected = held_out[int(str(completion.id))].record
        try:
            record = json.loads(text)
        except json.JSONDecodeError:
            continue  # none of its fields count as right
        right += sum(record.get(key) == value for key, value in expected.items())
    assert right / (7 * len(held_out)) >= 0.9
    total = sum((c.statistics for c in completions), start=SequenceStatistics())
    assert 0.6 <= total.acceptance_rate <= 0.98
    lengths = sorted(len(c.tokens) for c in completions)
    assert lengths[-1] > 2.5 * lengths[0]


def test_the_targets_first_layers_draft() -> None:
    """It was trained with losses at its exits: what they propose is accepted at both levels."""
    pair = load_pair(str(TARGET), None, torch.float32)
    engine = Engine(pair.target, None, EngineConfig(drafter="early_exit", draft_tokens=4, capacity=1024))
    for i, example in enumerate(islice(examples(seed=77), 24)):
        text = f"<|message|>{example.message}<|record|>"
        engine.submit(Request(i, pair.tokenizer(text)["input_ids"], max_new_tokens=100))
    total = sum((c.statistics for c in engine.run()), start=SequenceStatistics())
    assert 0.4 <= total.early_acceptance_rate <= 0.98
    assert 0.6 <= total.acceptance_rate <= 0.98
    assert total.mean_accepted_length > 2.5
