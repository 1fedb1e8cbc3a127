"""Trains the demo pair on generated messages, and writes it where `exspec` looks for it.

    python -m exspec.jobs.training.demo [--output FOLDER] [--minutes 34] [--exit-minutes 16] [--draft-minutes 8]

Writes `target/` and `draft/` (safetensors in bfloat16, tokenizer, chat template) and `training.json`, which records the
time, the hardware and the results on held-out messages. Target, draft and held-out messages have a seed each.

After that the target is trained with losses at its exits too, so that its first layers can draft (LayerSkip,
arXiv:2404.16710).
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.learners.learner import Lesson, Outcome
from exspec.actors.exactness import transformers_generate
from exspec.actors.hardware import describe_hardware
from exspec.jobs.demo import PAIR
from exspec.jobs.demo.messages import examples
from exspec.jobs.training.examples import batched, padded
from exspec.jobs.training.trainer import Trainer

MESSAGE, RECORD, END = "<|message|>", "<|record|>", "<|end|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}<|message|>{{ message.content }}
{%- elif message.role == 'assistant' -%}<|record|>{{ message.content }}<|end|>
{%- else -%}{{ raise_exception('the demo model knows the roles user and assistant only, not ' ~ message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|record|>{%- endif -%}"""

VOCABULARY = 1024
CONTEXT = 1024
SHORT = 250  # characters of the first messages, at most: copying facts is learned fastest on short ones
HELD_OUT_SEED, TARGET_SEED, DRAFT_SEED, TOKENIZER_SEED, EXITS_SEED = 1, 2, 3, 4, 6
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TARGET = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, **_HEADS}
DRAFT = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, **_HEADS}
EXITS = (1, 2)  # layers after which the target learns to predict the next token too
STEPS = 10**9  # the minutes end a training
EXIT_WEIGHT = 0.3  # weight of the loss at an exit; the last layer's is 1


def bpe(texts: Iterable[str], vocabulary: int, special: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE. Each digit is a token, so that copying a number is copying tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=CONTEXT)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of messages and records."""
    stream = examples(TOKENIZER_SEED)
    texts = (text for _ in range(6000) for e in (next(stream),) for text in (e.message, e.completion))
    made = bpe(texts, VOCABULARY, [MESSAGE, RECORD, END])
    made.chat_template = CHAT_TEMPLATE
    return made


def build_model(shape: dict[str, int], end: int, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """A Llama with random weights, which decodes greedily. end: the token that ends and pads texts."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        **shape,  # type: ignore[arg-type]
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    return model


def prompt_text(message: str) -> str:
    """The chat template's rendering of one user message."""
    return f"{MESSAGE}{message}{RECORD}"


def lessons_of(seed: int, longest: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Lesson]:
    """Endless batches of messages with at most `longest` characters, and their records."""
    end = tokenizer.vocab[END]
    shuffle = random.Random(0)
    stream = (e for e in examples(seed) if len(e.message) <= longest)
    while True:
        chunk = [next(stream) for _ in range(2048)]
        prompts = tokenizer([prompt_text(e.message) for e in chunk])["input_ids"]
        records = tokenizer([e.completion for e in chunk])["input_ids"]
        made = batched([(p, [*r, end]) for p, r in zip(prompts, records, strict=True)])
        shuffle.shuffle(made)
        yield from (Lesson(*padded(batch), torch.empty(0)) for batch in made)


class Pretraining:
    """Trains a whole model. Only tokens of records have a loss, so only they get logits.

    exits: layers whose hidden states, through the final norm and the head, learn to predict the next token too.
    """

    def __init__(self, model: Any, exits: Sequence[int], rate: float) -> None:
        self.model, self.exits, self.rate = model, exits, rate

    def matrices(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.model.layers.parameters() if p.ndim == 2]

    def outcome(self, lesson: Lesson) -> Outcome:
        own, model = lesson.own[:, 1:], self.model
        output = model.model(input_ids=lesson.tokens[:, :-1], use_cache=False, output_hidden_states=bool(self.exits))
        states = [output.last_hidden_state[own]]  # [tokens, D]
        states += [model.model.norm(output.hidden_states[n][own]) for n in self.exits]
        logits, wanted = [model.lm_head(h).float() for h in states], lesson.tokens[:, 1:][own]
        losses = [torch.nn.functional.cross_entropy(rows, wanted) for rows in logits]
        right = (logits[0].argmax(-1) == wanted)[:, None]
        return Outcome(losses[0] + EXIT_WEIGHT * sum(losses[1:]), right, torch.ones_like(right))


def train(
    model: Any,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    minutes: float,
    device: str,
    exits: Sequence[int] = (),
    rate: float = 0.004,
) -> dict[str, Any]:
    """Train for so many minutes, with short messages first."""
    short, every = (lessons_of(seed, longest, tokenizer) for longest in (SHORT, 100_000))
    tokens = 0

    def lesson(_: int, share: float) -> Lesson:
        nonlocal tokens
        found = next(short if share < 0.3 and not exits else every).to(torch.device(device))
        tokens += found.tokens.numel()
        return found

    trainer = Trainer(Pretraining(model.to(device), exits, rate), lesson, minutes, STEPS)
    trainer.run(lambda line: print(line, flush=True))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": round(trainer.seconds / 60, 1),
        "steps": trainer.step,
        "tokens": tokens,
        "loss": round(trainer.records[-1].loss, 5),
    }


@torch.no_grad()
def evaluate(model: Any, tokenizer: PreTrainedTokenizerFast, count: int, device: str) -> dict[str, float]:
    """Share of record fields that greedy decoding gets right on held-out messages."""
    model.to(device).eval()
    stream = examples(HELD_OUT_SEED)
    right = total = whole = 0
    for _ in range(count):
        example = next(stream)
        prompt = tokenizer(prompt_text(example.message))["input_ids"]
        (tokens,) = transformers_generate(model, [prompt], 400, model_end_ids(model))
        try:
            record = json.loads(str(tokenizer.decode(tokens, skip_special_tokens=True)))
        except json.JSONDecodeError:
            record = {}
        hits = sum(record.get(key) == value for key, value in example.record.items())
        right, total, whole = right + hits, total + len(example.record), whole + (hits == len(example.record))
    return {
        "held_out_messages": count,
        "fields_right": round(right / total, 4),
        "records_right": round(whole / count, 4),
    }


def main(
    output: Annotated[Path, typer.Option(help="Folder to write target/, draft/ and training.json into.")] = PAIR,
    minutes: Annotated[
        float, typer.Option(help="Minutes of training for the target. 0: keep the target of the folder.")
    ] = 34,
    exit_minutes: Annotated[float, typer.Option(help="Minutes of training for the target's exits. 0: none.")] = 16,
    draft_minutes: Annotated[
        float, typer.Option(help="Minutes of training for the draft. 0: keep the draft of the folder.")
    ] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train the demo pair."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    end = tokenizer.vocab[END]
    record = output / "training.json"
    summary: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    summary |= {
        "data": "messages generated by exspec.jobs.demo.messages, seeds "
        f"{TARGET_SEED} (target), {EXITS_SEED} (its exits), {DRAFT_SEED} (draft), {HELD_OUT_SEED} (held out)",
        "hardware": describe_hardware(torch.device(device)),
        "torch": torch.__version__,
    }
    steps: tuple[tuple[str, str, dict[str, int], int, float, dict[str, Any]], ...] = (
        ("target", "target", TARGET, TARGET_SEED, minutes, {}),
        ("exits", "target", TARGET, EXITS_SEED, exit_minutes, {"exits": EXITS, "rate": 0.002}),
        ("draft", "draft", DRAFT, DRAFT_SEED, draft_minutes, {}),
    )
    for name, folder, shape, seed, budget, how in steps:
        if not budget:
            continue
        model: Any = build_model(shape, end)
        if how:
            model = LlamaForCausalLM.from_pretrained(output / folder, dtype=torch.float32)
        summary[name] = train(model, seed, tokenizer, budget, device, **how)
        model.to(torch.bfloat16).save_pretrained(output / folder)
        tokenizer.save_pretrained(output / folder)
        # Evaluate what was saved: weights rounded to bfloat16, computed in float32.
        summary[name] |= evaluate(model.float(), tokenizer, 200, device)
        print(name, summary[name], flush=True)
        record.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
