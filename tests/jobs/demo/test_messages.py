"""The demo's messages: seeded, varied, and their records are what the text says."""

import json
import re
from itertools import islice

from exspec.jobs.demo.messages import CATEGORIES, MONTHS, examples

SAMPLE = list(islice(examples(11), 500))


def test_the_same_seed_gives_the_same_messages() -> None:
    assert list(islice(examples(11), 50)) == SAMPLE[:50]
    assert list(islice(examples(12), 50)) != SAMPLE[:50]


def test_kinds_and_lengths_are_spread() -> None:
    lengths = sorted(len(e.message) for e in SAMPLE)
    assert lengths[0] < 50
    assert lengths[-1] > 15 * lengths[0]
    outputs = sorted(len(e.completion) for e in SAMPLE)
    assert outputs[-1] > 2 * outputs[0]
    assert {e.record["category"] for e in SAMPLE} == set(CATEGORIES)
    assert {e.record["urgency"] for e in SAMPLE} == {"high", "normal", "low"}


def test_a_record_is_one_line_of_json_with_the_fields_promised() -> None:
    for example in SAMPLE:
        assert "\n" not in example.completion
        record = json.loads(example.completion)
        assert list(record) == ["category", "urgency", "product", "amounts", "dates", "orders", "summary"]


def test_every_fact_of_a_record_stands_in_its_message() -> None:
    """Orders as they are; amounts by their digits; dates by day and by month, as a number or a name."""
    for example in SAMPLE:
        text = example.message.lower()
        for order in example.record["orders"]:
            assert order in text
        for amount in example.record["amounts"]:
            assert amount.split(".")[0] in text
        for date in example.record["dates"]:
            month, day = map(int, date.split("-"))
            assert re.search(rf"\b0?{day}\b", text)
            assert re.search(rf"\b0?{month}\b|{MONTHS[month - 1][:3].lower()}", text)
