"""Labels and JSON: what the engine is asked for, and what is read from its completions."""

import json
import math
import pickle
from collections import defaultdict
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from exspec.actors.answers.answers import AnswerError, FreeText, asked
from exspec.actors.answers.choices import Choices
from exspec.actors.answers.json_schema import Json
from exspec.actors.engine import Completion, Engine, EngineConfig, SequenceStatistics
from exspec.actors.engine.tokens.constraint import tokens_of
from exspec.actors.models import Pair, load_pair
from exspec.actors.stop_strings import completion_text
from exspec.jobs.demo import DRAFT, TARGET
from exspec.jobs.demo.messages import examples
from tests import tiny

LABELS = ["no", "not", "not at all", "note", "yes", "ja", "réservé", "日本"]
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"enum": ["refund", "delivery", "praise"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 99},
        "share": {"type": ["number", "null"]},
        "urgent": {"type": "boolean"},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "who": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"],
                "additionalProperties": False},
    },
    "required": ["category", "score", "urgent", "words", "who"],
    "additionalProperties": False,
}  # fmt: skip
COLUMNS = {"category": ("c", pa.string()), "score": ("s", pa.int64()), "share": ("h", pa.float64()),
           "urgent": ("u", pa.bool_()), "words": ("w", pa.list_(pa.string())), "who": ("p", pa.string())}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(str(TARGET), str(DRAFT))


def prompts(pair: Pair, count: int) -> list[list[int]]:
    stream = examples(11)
    made = ([{"role": "user", "content": next(stream).message}] for _ in range(count))
    texts = [pair.tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in made]
    return [pair.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]  # type: ignore[misc]


def decode(
    pair: Pair, answers: Any, config: EngineConfig, count: int, budget: int | None = None
) -> list[tuple[Completion, str]]:
    """Completions and their texts, in the order of the prompts."""
    engine = Engine(pair.target, pair.draft if config.drafts else None, config)
    done = tiny.run(engine, tiny.requests(prompts(pair, count), budget or answers.longest, **asked(answers)))
    return [(done[i], completion_text(pair.tokenizer, done[i], None)) for i in range(count)]


EXSPEC = EngineConfig(batch_size=4, window=8, draft_tokens=4, bucket=128, capacity=512)


@torch.inference_mode()
def test_a_label_comes_with_its_probability_among_the_labels(pair: Pair) -> None:
    """Some labels begin others, some have several tokens. The oracle scores every whole label."""
    answers = Choices(pair.tokenizer, {"": LABELS}, {"": "label"})
    for (completion, text), prompt in zip(decode(pair, answers, EXSPEC, 8), prompts(pair, 8), strict=True):
        found = answers.read(completion, text)
        assert found["label"] == text
        assert text in LABELS
        probability = dict.fromkeys(LABELS, 1.0)
        for label in LABELS:
            tokens = [*pair.tokenizer(label, add_special_tokens=False)["input_ids"], *answers.end_ids]  # type: ignore[misc]
            walk = answers.constraint()
            for place, token in enumerate(tokens):
                logits = pair.target(input_ids=torch.tensor([[*prompt, *tokens[:place]]])).logits[0, -1]
                allowed = tokens_of(walk.allowed())
                probability[label] *= float(logits[allowed].softmax(0)[allowed.index(token)])
                walk.advance(token)
        assert math.isclose(sum(probability.values()), 1.0, rel_tol=1e-4)
        assert math.isclose(found["label_confidence"], probability[text], rel_tol=1e-3)
        rivals = found["label_runner_up"].split(" | ")
        assert math.isclose(found["label_runner_up_confidence"], sum(probability[r] for r in rivals), rel_tol=1e-3)
        assert text not in rivals


@pytest.mark.parametrize("spaces", [True, False])
def test_fields_are_one_json_object_with_and_without_speculation(pair: Pair, spaces: bool) -> None:
    fields = {"category": ["refund", "delivery", "praise", "question"], "how urgent?": ["high", "low", "hi"]}
    answers = Choices(pair.tokenizer, fields, {name: name for name in fields}, spaces)
    read = []
    for config in (EXSPEC, EXSPEC.plain()):
        for completion, text in decode(pair, answers, config, 12):
            values = answers.read(completion, text)
            separators = (", ", ": ") if spaces else (",", ":")
            assert text == json.dumps({name: values[name] for name in fields}, separators=separators)
            assert all(values[name] in labels for name, labels in fields.items())
            assert completion.statistics.forced > len(completion.tokens) / 2
            read.append((text, values))
    assert read[:12] == read[12:], "labels or confidences differ"


def test_json_of_a_schema_is_valid_or_an_error_with_and_without_speculation(pair: Pair) -> None:
    answers = Json(pair.tokenizer, SCHEMA, COLUMNS)
    done = decode(pair, answers, EXSPEC, 12, budget=120)
    plain = decode(pair, answers, EXSPEC.plain(), 12, budget=120)
    assert [c.tokens for c, _ in done] == [c.tokens for c, _ in plain]
    ended = [(c, text) for c, text in done if c.finish_reason == "stop"]
    assert len(ended) >= 6
    for completion, text in ended:
        values = answers.read(completion, text)
        jsonschema.validate(json.loads(text), SCHEMA)
        assert values["c"] == json.loads(text)["category"]
        assert isinstance(values["s"], int)
        assert values["p"] == json.dumps(json.loads(text)["who"])
    (cut,) = decode(pair, answers, EXSPEC, 1, budget=9)
    with pytest.raises(AnswerError, match="not complete after 9 tokens; raise max_new_tokens"):
        answers.read(*cut)


@torch.inference_mode()
def test_an_enum_property_comes_with_its_probability(pair: Pair) -> None:
    """The oracle asks for every allowed token which labels are still possible after it."""
    labels = ["refund", "refusal", "delivery", "praise", "réservé"]
    schema = {"type": "object", "properties": {"to": {"enum": labels}, "why": {"type": "string", "maxLength": 5}},
              "required": ["to", "why"], "additionalProperties": False}  # fmt: skip
    columns = {"to": ("to", pa.string()), "why": ("why", pa.string())}
    answers = Json(pair.tokenizer, schema, columns, labels={"to": labels})
    heads = {name: f'{{"to": "{name}"' for name in labels}

    def possible(tokens: list[int]) -> frozenset[str]:
        text = str(pair.tokenizer.decode(tokens)).rstrip("\ufffd")
        return frozenset(name for name, head in heads.items() if head.startswith(text) or text.startswith(head))

    done, plain = (decode(pair, answers, config, 10, budget=60) for config in (EXSPEC, EXSPEC.plain()))
    assert sum(completion.finish_reason == "stop" for completion, _ in done) >= 5
    for prompt, (completion, text), (other, _) in zip(prompts(pair, 10), done, plain, strict=True):
        if completion.finish_reason != "stop":
            continue
        found = answers.read(completion, text)
        assert found == answers.read(other, text)
        label, walk, confidence, rivals = json.loads(text)["to"], answers.constraint(), 1.0, [0.0]
        for place, token in enumerate(completion.tokens[:-1]):
            before = completion.tokens[:place]
            allowed = tokens_of(walk.allowed())
            walk.advance(token)
            if len(possible(before)) == 1:
                continue
            logits = pair.target(input_ids=torch.tensor([[*prompt, *before]])).logits[0, -1]
            chances: dict[frozenset[str], float] = defaultdict(float)
            for t, chance in zip(allowed, logits[allowed].softmax(0).tolist(), strict=True):
                chances[possible([*before, t])] += chance
            chances.pop(frozenset(), None)
            total = sum(chances.values())
            rivals += [confidence * chance / total for names, chance in chances.items() if label not in names]
            confidence *= sum(chance for names, chance in chances.items() if label in names) / total
        assert found["to"] == label
        assert math.isclose(found["to_confidence"], confidence, rel_tol=1e-3)
        assert math.isclose(found["to_runner_up_confidence"], max(rivals), rel_tol=1e-2, abs_tol=1e-9)
        assert label not in found["to_runner_up"].split(" | ")


class NoEnd:
    eos_token_id = None


class UpperCase:
    """Does not write what it was given."""

    eos_token_id = 2

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decode = tokenizer, tokenizer.decode

    def __call__(self, text: str, **_: Any) -> Any:
        return self.tokenizer(text.upper(), add_special_tokens=False)


def test_impossible_answers_are_refused_by_name(pair: Pair) -> None:
    with pytest.raises(AnswerError, match="uniqueItems"):
        Json(pair.tokenizer, {"type": "array", "uniqueItems": True}, {})
    with pytest.raises(AnswerError, match=r"\$\.type"):
        Json(pair.tokenizer, {"type": "objekt"}, {})
    for tokenizer, message in (
        (NoEnd(), "has no end token"),
        (UpperCase(pair.tokenizer), "label 'a': the tokenizer writes the answer as 'A'"),
    ):
        with pytest.raises(AnswerError, match=message):
            Choices(tokenizer, {"": ["a", "b"]}, {"": "label"})  # type: ignore[arg-type]


def test_a_number_that_no_column_can_hold_is_an_error_of_its_row(pair: Pair) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    answers = Json(pair.tokenizer, schema, {"n": ("n", pa.int64())})
    completion = Completion(0, [1, 2], "stop", 2, SequenceStatistics())
    assert answers.read(completion, '{"n": -5}') == {"n": -5}
    with pytest.raises(AnswerError, match="n is 99999999999999999999, which does not fit 64 bits"):
        answers.read(completion, '{"n": 99999999999999999999}')
    with pytest.raises(AnswerError, match="does not meet the schema"):
        answers.read(completion, '{"n": "five"}')
    assert FreeText().read(completion, "x") == {}


def test_answers_can_be_pickled_however_long_they_are(pair: Pair) -> None:
    """Ray pickles the requests of a sample with the functions that make their constraints."""
    fields = {f"field {i}": ["yes", "no", "perhaps"] for i in range(60)}
    answers = Choices(pair.tokenizer, fields, {name: name for name in fields})
    copied = pickle.loads(pickle.dumps(answers.constraint))()
    assert copied.allowed().tolist() == answers.constraint().allowed().tolist()
    schema = Json(pair.tokenizer, SCHEMA, COLUMNS)
    first = schema.constraint().allowed().tolist()
    assert pickle.loads(pickle.dumps(schema.constraint))().allowed().tolist() == first


def test_a_tokenizer_that_adds_a_leading_space_adds_none_between_labels() -> None:
    """As those of Llama 2 and Mistral do."""
    letters = sorted(set('▁{}":, abcdefghilmnorstuvwy_'))
    vocabulary = {letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<s>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    fields = {"a": ["high", "low"], "b": ["yes", "no"]}
    answers = Choices(tokenizer, fields, {name: name for name in fields})
    walk, tokens = answers.constraint(), []
    while (allowed := tokens_of(walk.allowed())) != [tokenizer.eos_token_id]:
        tokens.append(allowed[0])
        walk.advance(allowed[0])
    text = tokenizer.decode(tokens)
    values = answers.read(Completion(0, [*tokens, 1], "stop", 1, SequenceStatistics()), text)
    assert text == json.dumps({name: values[name] for name in fields})
