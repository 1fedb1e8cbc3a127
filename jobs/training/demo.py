"""Trains the demo pair on generated messages, and writes it where `exspec` looks for it.

    python -m exspec.jobs.training.demo [--output FOLDER] [--minutes 34] [--exit-minutes 16] [--draft-minutes 8]

Writes `target/` and `draft/` (safetensors in bfloat16, tokenizer, chat template) and `training.json`, which records the
time, the hardware and the results on held-out messages. Target, draft and held-out messages have a seed each.

After that the target is trained with losses at its exits too, so that its first layers can draft (LayerSkip,
arXiv:2404.16710).
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from exspec.actors.engine.engine import model_end_ids
from exspec.actors.exactness import transformers_generate
from exspec.actors.hardware import describe_hardware
from exspec.jobs.demo import PAIR
from exspec.jobs.demo.messages import examples
from exspec.jobs.training.examples import Batch, batches, optimizers_of

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
EXIT_WEIGHT = 0.3  # weight of the loss at an exit; the last layer's is 1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over messages and records. Each digit is a token, so that copying a number is copying tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    stream = examples(TOKENIZER_SEED)
    texts = (text for _ in range(6000) for e in (next(stream),) for text in (e.message, e.completion))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[MESSAGE, RECORD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.model_max_length = CONTEXT
    return wrapped


def build_model(shape: dict[str, int], end: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
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


def stream_of(seed: int, longest: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Endless batches of messages with at most `longest` characters, and their records."""
    end = tokenizer.vocab[END]
    shuffle = random.Random(0)
    stream = (e for e in examples(seed) if len(e.message) <= longest)
    while True:
        chunk = [next(stream) for _ in range(2048)]
        prompts = tokenizer([prompt_text(e.message) for e in chunk])["input_ids"]
        records = tokenizer([e.completion for e in chunk])["input_ids"]
        yield from batches([(p, [*r, end]) for p, r in zip(prompts, records, strict=True)], shuffle)


def train(
    model: Any,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    minutes: float,
    device: str,
    exits: Sequence[int] = (),
    rate: float = 0.004,
) -> dict[str, Any]:
    """Train for so many minutes. The learning rate warms up shortly, stays flat, then falls linearly to zero.

    Muon optimizes the layers' matrices, AdamW the rest. Only record tokens have a loss, so only they get logits.
    exits: layers whose hidden states, through the final norm and the head, learn to predict the next token too.
    """
    model.to(device).train()
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    optimizers = optimizers_of(model, matrices, rate)
    short, every = (stream_of(seed, longest, tokenizer) for longest in (SHORT, 100_000))
    start, step, tokens, running = time.monotonic(), 0, 0, [0.0] * (1 + len(exits))
    while (share := (time.monotonic() - start) / (60 * minutes)) < 1:
        ids, labels = (t.to(device) for t in next(short if share < 0.3 and not exits else every))
        losses = _losses(model, ids, labels, exits, device)
        (losses[0] + EXIT_WEIGHT * sum(losses[1:])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(1.0, (step + 1) / 50, (1 - share) / 0.6)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        kept = 0.98 if step else 0.0
        running = [kept * old + (1 - kept) * new.item() for old, new in zip(running, losses, strict=True)]
        step, tokens = step + 1, tokens + ids.numel()
        if step % 50 == 0:
            figures = "  ".join(f"{loss:.4f}" for loss in running)
            seconds = 60 * minutes * share
            print(f"step {step:5d}  {seconds:5.0f} s  {tokens / 1e6:6.2f} M tokens  loss {figures}", flush=True)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "steps": step,
        "tokens": tokens,
        "loss": round(running[0], 5),
    } | (
        {"loss_at_exits": {str(n): round(loss, 4) for n, loss in zip(exits, running[1:], strict=True)}} if exits else {}
    )


def _losses(
    model: Any, ids: torch.Tensor, labels: torch.Tensor, exits: Sequence[int], device: str
) -> list[torch.Tensor]:
    """Cross-entropy of the last layer's tokens, then of each exit's tokens."""
    on_record = labels != -100
    with torch.autocast(device, dtype=torch.bfloat16):
        output = model.model(input_ids=ids, use_cache=False, output_hidden_states=bool(exits))
        states = [output.last_hidden_state[on_record]]  # [tokens, D]
        states += [model.model.norm(output.hidden_states[n][on_record]) for n in exits]
        logits = [model.lm_head(h) for h in states]
    return [torch.nn.functional.cross_entropy(rows.float(), labels[on_record]) for rows in logits]


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
