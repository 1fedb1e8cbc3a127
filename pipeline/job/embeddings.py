"""Embedding jobs: a vector for each prompt."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pyarrow as pa

from exspec.pipeline.job.scores import USELESS as UNDRAFTED
from exspec.pipeline.job.settings import Job, setting

if TYPE_CHECKING:
    from exspec.actors.answers.answers import Answers

_embeddings = partial(setting, "Embeddings")
# Settings of a job that do not apply, because nothing is generated or drafted.
USELESS = tuple(
    name
    for name, field in Job.model_fields.items()
    if name in UNDRAFTED or field.json_schema_extra["group"] == "Sampling"  # type: ignore[index]
)


class EmbedJob(Job):
    """A job that computes the embedding of each prompt, and generates nothing."""

    kind: ClassVar[str] = "embed"
    reads: ClassVar[bool] = True
    embeds: ClassVar[bool] = True

    pooling: Literal["last", "mean"] = _embeddings(
        "last", "Take the hidden state of the prompt's last token, or the mean over all its tokens."
    )
    normalize: bool = _embeddings(True, "Scale embeddings to a length of 1.")
    dimensions: int | None = _embeddings(
        None, "Keep the first N numbers of an embedding, before it is scaled. Default: all.", ge=1
    )

    def _broken(self) -> Iterator[str]:
        yield from super()._broken()
        if useless := [name for name in USELESS if getattr(self, name) != Job.model_fields[name].default]:
            yield f"{useless[0]} does not apply to an embedding job: nothing is generated or drafted"
        if self.method not in ("auto", "plain") or self.drafter not in ("auto", "none"):
            yield "method and drafter do not apply to an embedding job: nothing is drafted"

    def form_columns(self) -> pa.Schema:
        kind = pa.list_(pa.float32(), self.dimensions or -1)  # -1: of any length, before the target is known
        return pa.schema([pa.field("embedding", kind, metadata={"description": "the embedding of the prompt"})])

    @property
    def value_columns(self) -> list[str]:
        return ["embedding"]

    def form(self, tokenizer: Any) -> "Answers":  # noqa: ARG002
        from exspec.actors.answers.embeddings import Embeddings

        return Embeddings(self.pooling, self.normalize, self.dimensions)
