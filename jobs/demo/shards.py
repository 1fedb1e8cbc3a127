"""Demo messages as Parquet shards."""

import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from exspec.jobs.demo.messages import examples
from exspec.pipeline.errors import counted

SEED = 5  # the demo pair was trained on others


def write_shards(folder: Path, rows: int, shards: int) -> None:
    """Write `rows` messages to `folder`, with the record that each should become."""
    folder.mkdir(parents=True, exist_ok=True)
    made = list(islice(examples(SEED), rows))
    size = -(-rows // shards)
    for number, first in enumerate(range(0, rows, size)):
        part = made[first : first + size]
        table = pa.table(
            {
                "id": [f"message-{first + i}" for i in range(len(part))],
                "message": [example.message for example in part],
                "category": [example.record["category"] for example in part],
                "urgency": [example.record["urgency"] for example in part],
                "record": [json.dumps(example.record) for example in part],
            }
        )
        pq.write_table(table, folder / f"messages-{number:03}.parquet")
    print(f"{counted(rows, 'message')} in {folder}")
