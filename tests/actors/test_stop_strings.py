"""Stop strings are found at the same token as by decoding the whole text after every token."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from exspec.actors.engine import Request
from exspec.actors.stop_strings import StopStrings
from exspec.jobs.demo import TARGET
from tests import tiny

SPECIAL = ["<end>", "<pad>"]


class Whole:
    """The slow, obvious way: decode the whole text after every token."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], least: int) -> None:
        self.tokenizer, self.strings, self.least = tokenizer, strings, least

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def __call__(self, tokens: Sequence[int]) -> str | None:
        """The string that begins first, and of those the longest. One that is complete too early does not count."""
        text, before = self.text(tokens), len(self.text(tokens[: max(self.least - 1, 0)]))
        places = [(text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self.strings]
        self.cut, _, found = min((p for p in places if p[0] >= 0), default=(len(text), 0, None))
        return found


def fast(model: Any, decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    made.decoder = decoder
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, **options)
    wrapped.add_special_tokens({"eos_token": SPECIAL[0], "pad_token": SPECIAL[1]})
    return wrapped


def words(pieces: Sequence[str]) -> models.WordLevel:
    return models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0])


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return fast(
        words([*alphabet, "ST", "OP", "ab", "a.b", "\u0120\u0120", "\u0120a", "\u00e2\u0124"]), decoders.ByteLevel()
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have: the first space of a text is dropped, rare characters are written as bytes."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["<unk>", *bytes_, "▁", "▁a", "a", "b", "▁b", "▁▁", "ST", "OP", "é", ".", "€"]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return fast(words(pieces), decoders.Sequence(steps))


def cleaned() -> PreTrainedTokenizerFast:
    """As BERT has: spaces between words, and none before punctuation."""
    pieces = ["[UNK]", "do", "don", "n", "'", "t", "n't", ".", ",", "a", "b", "##a", "##b", "we", "re", "s", "!"]
    return fast(words(pieces), decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level, "byte fallback": byte_fallback, "cleaned": cleaned,
    "demo": lambda: AutoTokenizer.from_pretrained(TARGET),
}  # fmt: skip


def phrases(name: str, tokenizer: Any) -> list[list[int]]:
    """What random tokens hardly ever spell: characters of several bytes, and text that clean-up changes."""
    if name == "cleaned":
        split = [["do", "n", "'", "t"], ["we", "'", "re"], ["a", ".", "b"], ["do", "n't"]]
        return [tokenizer.convert_tokens_to_ids(pieces) for pieces in split]
    texts = ["é", "a€b", "😀", "€€"]
    if name == "demo":
        return [tokenizer(text)["input_ids"] for text in texts]
    if name == "byte fallback":
        return [tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()]) for text in texts]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return [tokenizer.convert_tokens_to_ids(list(spell(text)[0][0])) for text in texts]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_hits_and_cuts_equal_those_of_decoding_everything(name: str) -> None:
    """The strings are pieces of random texts. They lie inside tokens, across tokens, in characters of several bytes,
    and in each other."""
    tokenizer, rng = TOKENIZERS[name](), random.Random(0)
    vocabulary, whole = len(tokenizer), phrases(name, tokenizer)
    common = [rng.randrange(vocabulary) for _ in range(12)]
    ended = 0
    for trial in range(300):
        pool = common if trial % 3 else range(vocabulary)
        tokens = rng.choices([*pool, *tokenizer.all_special_ids[:2]] if trial % 2 else pool, k=30)
        for _ in range(rng.choice([0, 3, 10])):
            place = rng.randrange(len(tokens))
            tokens[place:place] = rng.choice(whole)
        text = tokenizer.decode(rng.choices(pool, k=30) if trial % 4 == 0 else tokens, skip_special_tokens=True)
        places = [rng.randrange(max(len(text), 1)) for _ in range(rng.choice([1, 2, 3]))]
        strings = [text[place : place + rng.choice([1, 2, 3, 7, 20])] for place in places if text[place:]]
        if not strings:
            continue
        least = rng.choice([0, 0, 1, 5, 20])
        stop, whole_text = StopStrings(tokenizer, strings, least), Whole(tokenizer, strings, least)
        check = stop()
        for n, token in enumerate(tokens, 1):
            expected = whole_text(tokens[:n])
            assert check(token) == expected, (strings, tokens[:n], least)
            if expected is not None:
                ended += 1
                break
        assert stop.cut(tokens[:n]) == whole_text.text(tokens[:n])[: whole_text.cut]
    assert ended > 150, "too few trials have a stop string"


def test_most_tokens_are_not_decoded() -> None:
    """Decoding is what a check costs. Only the first token is decoded."""
    tokenizer, calls = byte_level(), []
    stop = StopStrings(tokenizer, ["STOP", "\n\n"])
    tokens = tokenizer.convert_tokens_to_ids(list("abcdOab.STxyz" * 20))
    warm = stop()
    assert [warm(token) for token in tokens] == [None] * len(tokens)
    check, decode = stop(), tokenizer.decode
    tokenizer.decode = lambda *args, **options: calls.append(args) or decode(*args, **options)  # type: ignore[method-assign, func-returns-value]
    assert [check(token) for token in tokens] == [None] * len(tokens)
    assert len(calls) == 1


def test_checks_of_the_same_strings_are_independent() -> None:
    tokenizer = byte_level()
    stop = StopStrings(tokenizer, ["STOP"])
    first, second = stop(), stop()
    start, end = tokenizer.convert_tokens_to_ids(["ST", "OP"])
    assert [first(start), second(end), first(end), second(start), second(end)] == [None, None, "STOP", None, "STOP"]


def test_a_stop_string_is_found_after_many_tokens_and_across_special_ones() -> None:
    tokenizer = byte_level()
    stop = StopStrings(tokenizer, ["STOP", "end"])
    tokens = tokenizer.convert_tokens_to_ids(["a", "b"] * 500 + ["ST"] + ["<end>"] * 60 + ["OP"])
    check = stop()
    assert [check(token) for token in tokens] == [None] * (len(tokens) - 1) + ["STOP"]
    assert stop.cut(tokens) == "ab" * 500


@pytest.mark.parametrize("strings", [[], [""], ["x", ""]])
def test_empty_stop_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="stop: expected one or more strings, none of them empty"):
        StopStrings(byte_level(), strings)


def test_the_engine_stops_at_a_string() -> None:
    """The token that completes the string is the last of the completion, and the last that is counted."""
    tokenizer, target = byte_level(), tiny.model(eos_token_id=None)
    free = tiny.generate(target, [3, 4], 20)
    text = tokenizer.decode(free)
    string = text[len(text) // 2 : len(text) // 2 + 5]
    stop = StopStrings(tokenizer, [string])
    engine = tiny.engine(target, draft=tiny.model(seed=1, eos_token_id=None))
    done = tiny.run(engine, [Request(0, [3, 4], 20, stop=stop)])[0]
    assert done.tokens == free[: len(done.tokens)]
    assert (done.finish_reason, done.stopped_by) == ("stop", string)
    assert string in tokenizer.decode(done.tokens)
    assert string not in tokenizer.decode(done.tokens[:-1])
    assert stop.cut(done.tokens) == text[: text.index(string)]
    assert done.statistics.completion_tokens == len(done.tokens) < 20
