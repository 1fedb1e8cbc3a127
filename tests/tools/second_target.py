"""Trains a small target on another kind of text than the demo's, and writes prompts for it.

    python -m tests.tools.second_target FOLDER [--minutes 9]

The texts are the functions of Python's standard library. 2,200 of them are held out: FOLDER/in has their first two
lines as prompts, and FOLDER/target the target.
"""

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer

from exspec.actors.engine.learners.learner import Lesson
from exspec.jobs.training.demo import END, Pretraining, bpe, build_model
from exspec.jobs.training.examples import padded
from exspec.jobs.training.trainer import Trainer

VOCABULARY = 2048
SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
         "num_key_value_heads": 2}  # fmt: skip
PROMPTS, SHARDS = 2200, 8
TEXTS, TOKENS = 24, 192  # of a step; tokens of a text at most


def functions() -> Iterator[str]:
    """The text of every function of 4 lines or more and 120 to 3,000 characters."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            source = file.read_text()
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # files that test Python's own parser
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = lines[node.lineno - 1 : node.end_lineno]
                text = "\n".join(line[node.col_offset :] for line in body)
                if len(body) >= 4 and 120 < len(text) < 3000:
                    yield text


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the target and its prompts.")],
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 9,
) -> None:
    """Train the target."""
    torch.manual_seed(0)
    texts = list(dict.fromkeys(functions()))
    random.Random(0).shuffle(texts)
    held, texts = texts[:PROMPTS], texts[PROMPTS:]
    tokenizer = bpe(texts, VOCABULARY, [END])
    end = tokenizer.vocab[END]
    rows = [[*ids, end][:TOKENS] for ids in tokenizer(texts)["input_ids"]]

    def lesson(step: int, _: float) -> Lesson:
        return Lesson(*padded([([], row) for row in random.Random(step).choices(rows, k=TEXTS)]), torch.empty(0))

    model = build_model(SHAPE, end, VOCABULARY)
    Trainer(Pretraining(model, (), 0.004), lesson, minutes, 10**9).run(print)
    model.to(torch.bfloat16).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "in").mkdir()
    prompts = ["\n".join(text.splitlines()[:2]) for text in held]
    for shard in range(SHARDS):
        pq.write_table(pa.table({"prompt": prompts[shard::SHARDS]}), folder / "in" / f"{shard}.parquet")


if __name__ == "__main__":
    typer.run(main)
