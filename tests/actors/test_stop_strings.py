"""Stop strings are found at the token that a decoding of the whole text after every token finds them at."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from exspec.actors.stop_strings import StopStrings
from exspec.jobs.demo import TARGET

SPECIAL = ["<end>", "<pad>"]


class Whole:
    """The plain way: decodes the end of the text after every token, and all of it where a string may be there."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], least: int) -> None:
        self.tokenizer, self.strings, self.least = tokenizer, tuple(strings), least
        self.special = frozenset(tokenizer.all_special_ids)
        self.tail = 4 * max(map(len, strings)) + 8

    def __call__(self, tokens: Sequence[int]) -> str | None:
        seen = [t for t in tokens if t not in self.special]
        if not any(s in self._text(seen[-self.tail :]) for s in self.strings):
            return None
        text, before = self._text(tokens), len(self._text(tokens[: max(self.least - 1, 0)]))
        places = [(text.find(s, max(before - len(s) + 1, 0)), -len(s), s) for s in self.strings]
        return min((place for place in places if place[0] >= 0), default=(0, 0, None))[2]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


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
    """As those of Llama 2 and Mistral: the first space of a text is not written, bytes stand for rare characters."""
    pieces = [
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "▁b",
        "▁▁",
        "ST",
        "OP",
        "é",
        ".",
        "€",
    ]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return fast(words(pieces), decoders.Sequence(steps))


def cleaned() -> PreTrainedTokenizerFast:
    """As those of BERT: words part at spaces, and the spaces before punctuation are taken out of the text."""
    pieces = ["[UNK]", "do", "don", "n", "'", "t", "n't", ".", ",", "a", "b", "##a", "##b", "we", "re", "s", "!"]
    return fast(words(pieces), decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True)


def demo() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


MADE = {"byte level": byte_level, "byte fallback": byte_fallback, "cleaned": cleaned, "demo": demo}


def phrases(name: str, tokenizer: Any) -> list[list[int]]:
    """What random tokens would hardly ever come to: characters of several bytes, and text that clean-up changes."""
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


@pytest.mark.parametrize("name", MADE)
def test_the_first_hit_is_that_of_decoding_everything(name: str) -> None:
    """Strings are cut out of texts of random tokens, so that they lie anywhere: in tokens, across them, in characters
    of several bytes, one in the other."""
    tokenizer, rng = MADE[name](), random.Random(0)
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
        check, plain = StopStrings(tokenizer, strings, least)(), Whole(tokenizer, strings, least)
        for n, token in enumerate(tokens, 1):
            expected = plain(tokens[:n])
            assert check(token) == expected, (strings, tokens[:n], least)
            if expected is not None:
                ended += 1
                break
    assert ended > 150, "the test finds too little to mean anything"


def test_most_tokens_are_not_decoded() -> None:
    """The cost of a check is that of decoding, so it is counted: one decode for the first token alone."""
    tokenizer, calls = byte_level(), []
    stop = StopStrings(tokenizer, ["STOP", "\n\n"])
    tokens = tokenizer.convert_tokens_to_ids(list("abcdOab.STxyz" * 20))
    warm = stop()
    assert [warm(token) for token in tokens] == [None] * len(tokens)
    check, decode = stop(), tokenizer.decode
    tokenizer.decode = lambda *args, **options: calls.append(args) or decode(*args, **options)  # type: ignore[method-assign, func-returns-value]
    assert [check(token) for token in tokens] == [None] * len(tokens)
    assert len(calls) == 1


def test_checks_of_one_set_of_strings_do_not_see_each_other() -> None:
    tokenizer = byte_level()
    stop = StopStrings(tokenizer, ["STOP"])
    first, second = stop(), stop()
    start, end = tokenizer.convert_tokens_to_ids(["ST", "OP"])
    assert [first(start), second(end), first(end), second(start), second(end)] == [None, None, "STOP", None, "STOP"]
