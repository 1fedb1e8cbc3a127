"""The loop that trains every drafter."""

import io
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

from exspec.actors.engine.learners.learner import Lesson, Outcome

WARM_UP = 30  # steps
FALLS = 0.5  # share of the training after which the learning rate falls, linearly to zero
SHOWN = 25  # steps between records
EVERY = 60.0  # seconds between checkpoints
BETAS = (0.9, 0.95)


class Trainable(Protocol):
    """What the loop trains."""

    rate: float
    model: Any

    def outcome(self, lesson: Lesson) -> Outcome: ...

    def matrices(self) -> list[torch.nn.Parameter]: ...


@dataclass(frozen=True)
class Record:
    """Means over the steps since the last record. right: share of right tokens by position of the draft, each among
    all drafts that have a token there. accept_length: tokens that a round would commit, the bonus included."""

    step: int
    seconds: float
    loss: float
    right: tuple[float, ...]
    accept_length: float

    def __str__(self) -> str:
        shares = " ".join(f"{share:.0%}" for share in self.right)
        return (
            f"step {self.step}, {self.seconds:.0f} s: loss {self.loss:.3f}, right tokens {shares}, "
            f"accept length {self.accept_length:.2f}"
        )


@dataclass
class Tally:
    """Sums over some steps."""

    steps: int = 0
    loss: float = 0.0
    right: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    known: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    kept: float = 0.0
    drafts: int = 0

    @torch.no_grad()
    def add(self, outcome: Outcome) -> None:
        right, known = (t.cpu() for t in (outcome.right & outcome.known, outcome.known))
        self.steps, self.loss = self.steps + 1, self.loss + outcome.loss.item()
        self.right, self.known = self.right + right.sum(0), self.known + known.sum(0)
        self.kept += right.cumprod(1).sum().item()
        self.drafts += len(right)

    def record(self, step: int, seconds: float) -> Record:
        right = tuple((self.right / self.known.clamp(min=1)).tolist())
        return Record(step, seconds, self.loss / self.steps, right, 1 + self.kept / max(self.drafts, 1))


class Trainer:
    """Trains for so many minutes or steps, whichever ends first. Muon optimizes the matrices, AdamW the rest.

    lesson: gives the batch of a step. checkpoint: a file from which a training that was killed goes on; None: none is
    written. seconds: how many of the training's have already passed. Where torch.distributed runs, every process takes
    other lessons and all keep the same weights.
    """

    def __init__(
        self, learner: Trainable, lesson: Callable[[int, float], Lesson], minutes: float, steps: int,
        checkpoint: Path | None = None, seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.learner, self.lesson, self.limit, self.steps = learner, lesson, 60 * minutes, steps
        self.file = checkpoint
        self.step, self.seconds, self.records = 0, seconds, list[Record]()
        self.rank, self.workers = 0, 1
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.workers = distributed.get_rank(), distributed.get_world_size()
        matrices = learner.matrices()
        others = [p for p in learner.model.parameters() if p.requires_grad and not any(p is m for m in matrices)]
        self.trained = [*matrices, *others]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=learner.rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learner.rate, betas=BETAS, weight_decay=0.0),
        ]
        if self.file and self.file.exists():
            self._resume(self.file)
        if self.workers > 1:
            for tensor in learner.model.state_dict().values():
                distributed.broadcast(tensor, 0)

    @property
    def share(self) -> float:
        """How much of the training is done."""
        return max(self.seconds / self.limit, self.step / self.steps)

    def run(self, say: Callable[[str], None], go_on: Callable[["Trainer"], bool] = lambda _: True) -> bool:
        """Train to the end, or until `go_on`, which is asked with every record, says no. Returns its last answer. say:
        prints a line of progress."""
        model, device = self.learner.model, next(self.learner.model.parameters()).device.type
        model.train()
        tally, saved, going = Tally(), time.monotonic(), True
        while going and self.share < 1:
            began = time.monotonic()
            lesson = self.lesson(self.step * self.workers + self.rank, self.share)
            with torch.autocast(device, dtype=torch.bfloat16):
                outcome = self.learner.outcome(lesson)
            outcome.loss.backward()
            self._together()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            scale = min(1.0, (self.step + 1) / WARM_UP, (1 - self.share) / (1 - FALLS))
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = self.learner.rate * scale
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            tally.add(outcome)
            self.step, self.seconds = self.step + 1, self._agreed(self.seconds + time.monotonic() - began)
            if self.step % SHOWN == 0 or self.share >= 1:
                if tally.drafts or not self.records:  # a few steps may have texts without a draft to judge
                    self.records.append(tally.record(self.step, self.seconds))
                    say(str(self.records[-1]))
                tally, going = Tally(), go_on(self)
            if self.file and not self.rank and time.monotonic() - saved > EVERY:
                self._save(self.file)
                saved = time.monotonic()
        model.eval()
        return going

    def _together(self) -> None:
        """Give every process the mean of all gradients."""
        if self.workers > 1:
            for p in self.trained:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                distributed.all_reduce(grad)
                p.grad = grad / self.workers

    def _agreed(self, seconds: float) -> float:
        """The first process's time, so that all end with the same step."""
        if self.workers == 1:
            return seconds
        shared = torch.tensor(seconds, dtype=torch.float64, device=self.trained[0].device)
        distributed.broadcast(shared, 0)
        return shared.item()

    def _save(self, file: Path) -> None:
        state = {
            "model": self.learner.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "records": [asdict(record) for record in self.records],
            "random": torch.get_rng_state(),
        }
        part, packed = file.with_suffix(".part"), io.BytesIO()
        torch.save(state, packed)  # to a full disk it would raise an error without the reason
        try:
            with part.open("wb") as stream:
                stream.write(packed.getbuffer())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(part)) from error
        part.replace(file)

    def _resume(self, file: Path) -> None:
        state = torch.load(file, map_location="cpu", weights_only=True)
        self.learner.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.seconds = state["step"], state["seconds"]
        self.records = [Record(**values) for values in state["records"]]
        torch.set_rng_state(state["random"])
