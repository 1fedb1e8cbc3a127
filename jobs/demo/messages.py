"""Messy customer messages with the record each one should be turned into, generated from a seed.

A record is a JSON object: category, urgency, product, amounts, dates, orders (each list in order of appearance)
and a one-line summary. The message hides them behind formats, typos, filler and quoted replies:
`12,50 EUR`, `12.50 €` and `12.50 euros` are all the amount `12.50 EUR`; `14/03/2026` and `March 14th` the date `03-14`.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CATEGORIES: dict[str, list[str]] = {
    "refund": [
        "I want my money back for the {p}.",
        "Please refund the {p}.",
        "I am still waiting for the refund of the {p}.",
        "When do I get my money back for the {p}?",
    ],
    "delivery": [
        "The {p} has not arrived yet.",
        "Where is my {p}? Tracking shows nothing.",
        "My parcel with the {p} is late.",
        "The courier never delivered the {p}.",
    ],
    "damaged": [
        "The {p} arrived broken.",
        "The {p} came with a big crack.",
        "My {p} stopped working after one use.",
        "The {p} was smashed in the box.",
    ],
    "billing": [
        "I was charged twice for the {p}.",
        "The invoice for the {p} is wrong.",
        "Your bill for the {p} does not add up.",
        "There is a payment for the {p} on my card that I do not know.",
    ],
    "cancel": [
        "Please cancel my order of the {p}.",
        "I no longer need the {p}, cancel it.",
        "I changed my mind, stop the order of the {p}.",
        "Can I still cancel the {p}?",
    ],
    "exchange": [
        "I would like to swap the {p} for another size.",
        "You sent the wrong colour, I need to exchange the {p}.",
        "Can I exchange the {p}?",
        "The {p} is too small, please send a bigger one instead.",
    ],
    "question": [
        "Does the {p} come with a warranty?",
        "Is the {p} dishwasher safe?",
        "How do I clean the {p}?",
        "Could you tell me whether the {p} fits a small kitchen?",
    ],
    "praise": [
        "I love the {p}, great work!",
        "Just wanted to say thanks for the {p}.",
        "The {p} is the best thing I bought this year.",
        "Five stars for the {p}.",
    ],
}
REQUESTS = {
    "refund": "wants a refund for",
    "delivery": "is waiting for",
    "damaged": "reports damage to",
    "billing": "disputes the bill for",
    "cancel": "wants to cancel",
    "exchange": "wants to exchange",
    "question": "has a question about",
    "praise": "is happy with",
}
URGENCY = {
    "high": ["This is urgent!", "I need an answer today.", "Please hurry, asap!", "Fix this immediately."],
    "low": ["No rush.", "Whenever you find the time.", "It is not urgent.", "Take your time."],
    "normal": [""],
}
COLOURS = ["black", "white", "red", "blue", "green", "grey", "yellow", "brown", "orange", "silver"]
NOUNS = [
    "kettle", "toaster", "lamp", "backpack", "blender", "jacket", "keyboard", "monitor", "headset", "chair",
    "desk", "mixer", "camera", "phone case", "rug", "mattress", "bike helmet", "coffee grinder", "tent", "watch",
]  # fmt: skip
FACTS = [
    "I paid {a} on {d}.",
    "My order number is {o}.",
    "It is order {o} from {d}.",
    "I was charged {a} for order {o}.",
    "On {d} I called your hotline.",
    "The price was {a}, then {a}.",
    "You promised me an answer by {d}.",
    "See also {o} and {o}.",
    "The shipping cost me another {a}.",
    "The bank booked {a} on {d} for {o}.",
    "Between {d} and {d} nobody replied.",
    "My last invoice says {a}.",
]
FILLER = [
    "I have been a customer for years.",
    "My neighbour told me about your shop.",
    "I tried your chat but it was closed.",
    "The weather has been awful as well.",
    "Your website is hard to use on my tablet.",
    "My daughter helped me write this.",
    "I already asked your colleague about it.",
    "It was meant to be a birthday present.",
    "I really hope you can help me.",
    "We moved house in the meantime.",
    "The packaging was nice though.",
    "I could not find an answer in the faq.",
]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]  # fmt: skip
NAMES = ["Anna", "Ben", "Carla", "Dmitri", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Lena"]
CURRENCIES = {"USD": ["dollars"], "EUR": ["€", "euros"], "GBP": ["£", "pounds"]}


@dataclass(frozen=True)
class Example:
    """One customer message and the record it should become."""

    message: str
    record: dict[str, Any]

    @property
    def completion(self) -> str:
        return json.dumps(self.record, separators=(",", ":"))


def examples(seed: int) -> Iterator[Example]:
    """An endless stream of examples; the same seed gives the same stream."""
    rng = random.Random(seed)
    while True:
        yield _example(rng)


def _example(rng: random.Random) -> Example:
    category = rng.choice(sorted(CATEGORIES))
    urgency = rng.choice(sorted(URGENCY))
    product = f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}"
    found: dict[str, list[str]] = {"a": [], "d": [], "o": []}

    kind = rng.choices(["line", "mail", "thread"], [3, 5, 3])[0]
    n_facts = {"line": rng.randint(0, 1), "mail": rng.randint(1, 4), "thread": rng.randint(3, 8)}[kind]
    n_filler = {"line": 0, "mail": rng.randint(0, 3), "thread": rng.randint(3, 8)}[kind]
    opening = rng.choice(CATEGORIES[category]).format(p=product)
    rest = rng.sample(FACTS, n_facts) + rng.sample(FILLER, n_filler) + [rng.choice(URGENCY[urgency])]
    rng.shuffle(rest)
    sentences = [opening, *filter(None, rest)]
    if kind != "line" and rng.random() < 0.5:
        sentences.insert(rng.randint(0, 2), sentences.pop(0))
    sentences = [_fill(_typos(sentence, rng), found, rng) for sentence in sentences]

    message = {"line": " ".join, "mail": _mail(rng), "thread": _thread(rng)}[kind](sentences)
    if rng.random() < 0.25:
        message = message.lower()
    record = {
        "category": category,
        "urgency": urgency,
        "product": product,
        "amounts": found["a"],
        "dates": found["d"],
        "orders": found["o"],
        "summary": _summary(category, product, urgency, found),
    }
    return Example(message, record)


def _summary(category: str, product: str, urgency: str, found: dict[str, list[str]]) -> str:
    order = f" (order {found['o'][0]})" if found["o"] else ""
    amount = f", {found['a'][0]} at stake" if found["a"] else ""
    prefix = {"high": "Urgent: customer", "low": "No hurry: customer", "normal": "Customer"}[urgency]
    return f"{prefix} {REQUESTS[category]} the {product}{order}{amount}."


def _fill(sentence: str, found: dict[str, list[str]], rng: random.Random) -> str:
    """Write a fact into every slot, in a random format, and note its normal form."""

    def write(match: re.Match[str]) -> str:
        text, normal = WRITERS[match[1]](rng)
        found[match[1]].append(normal)
        return text

    return re.sub(r"\{([ado])\}", write, sentence)


def _amount(rng: random.Random) -> tuple[str, str]:
    whole, cents = rng.randint(1, 10 ** rng.randint(1, 4) - 1), rng.choice([0, 0, 50, 99, rng.randint(1, 99)])
    currency = rng.choice(sorted(CURRENCIES))
    number = f"{whole}.{cents:02}"
    # The currency follows the number, but for the dollar sign, so that a number with none behind it is in dollars.
    formats = [f"{number} {name}" for name in (currency, *CURRENCIES[currency])]
    formats.append(f"{whole},{cents:02} {currency}")
    if cents == 0:
        formats.append(f"{whole} {currency}")
    if currency == "USD":
        formats += [f"${number}"] * 3
    return rng.choice(formats), f"{number} {currency}"


def _date(rng: random.Random) -> tuple[str, str]:
    month, day, year = rng.randint(1, 12), rng.randint(1, 28), rng.randint(2023, 2026)
    name = MONTHS[month - 1]
    formats = [f"{year}-{month:02}-{day:02}", f"{day:02}/{month:02}/{year}", f"{name} {day}", f"{day} {name} {year}",
               f"{name[:3]} {day}", f"{day}.{month}.{year}"]  # fmt: skip
    return rng.choice(formats), f"{month:02}-{day:02}"


def _order(rng: random.Random) -> tuple[str, str]:
    number = str(rng.randint(10_000, 9_999_999))
    return rng.choice([f"#{number}", number, f"ORD-{number}", f"no. {number}"]), number


WRITERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"a": _amount, "d": _date, "o": _order}


def _typos(sentence: str, rng: random.Random) -> str:
    """Swap, drop or double one inner letter in about one word of twenty; slots stay whole."""

    def spoil(match: re.Match[str]) -> str:
        word = match[0]
        if rng.random() > 0.05:
            return word
        i = rng.randrange(1, len(word) - 1)
        kind = rng.randrange(3)
        if kind == 0:
            return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        return word[:i] + word[i + 1 :] if kind == 1 else word[: i + 1] + word[i:]

    return re.sub(r"[a-zA-Z]{4,}", spoil, sentence)


def _mail(rng: random.Random) -> Callable[[list[str]], str]:
    def join(sentences: list[str]) -> str:
        greeting = rng.choice(["Hi,", "Hello,", "Dear team,", "Hey there", "To whom it may concern,"])
        goodbye = rng.choice(["Thanks", "Best regards", "Cheers", "Yours"])
        return f"{greeting}\n{' '.join(sentences)}\n{goodbye}, {rng.choice(NAMES)}"

    return join


def _thread(rng: random.Random) -> Callable[[list[str]], str]:
    """Replies on top of quoted mails, the quotes marked with `> ` and one level deeper each."""

    def join(sentences: list[str]) -> str:
        cuts = sorted(rng.sample(range(1, len(sentences)), min(2, len(sentences) - 1)))
        mails = [sentences[i:j] for i, j in zip([0, *cuts], [*cuts, len(sentences)], strict=True)]
        lines = []
        for depth, mail in enumerate(mails):
            quote = "> " * depth
            lines.append(f"{quote}From: {rng.choice(NAMES).lower()}{rng.randint(1, 99)}@mail.example")
            lines.extend(f"{quote}{sentence}" for sentence in mail)
        return "\n".join(lines)

    return join
