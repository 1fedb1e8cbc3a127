"""`python -m tests.tools.count TARGET:DRAFT`: counts the kernels, bytes and waits of a round, without a GPU.

The engine's own forwards run on tensors that have shapes and no values. Compiled pieces are counted by the compiler's
plan for a GPU, without generating code. Outside of them every operation that is not a view is a kernel.

The first layers are counted and multiplied, because all layers of a model are alike.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config as compiler
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.dependencies import StarDep
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.drafters import sparse
from exspec.actors.engine.drafters.drafter import DraftRows
from exspec.actors.engine.drafters.model import DraftModel
from exspec.actors.engine.engine import pick
from exspec.actors.engine.graphs import HostCopy, Recordings
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import CachedModel, kv_shape, locate
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.kv.tiling import tiling
from exspec.actors.engine.kv.window import recent_pages, window_pages
from exspec.actors.engine.layers import programs
from exspec.actors.engine.layers.programs import Code, Run
from exspec.actors.engine.methods import build as build_parts
from exspec.actors.engine.methods import compiling
from exspec.actors.engine.shape.roofline import Sizes
from exspec.actors.engine.tokens.constraint import Automaton, Constraint, MakeConstraint, Node
from exspec.actors.engine.tokens.sampling import Sampler
from exspec.actors.exactness import Waits
from exspec.jobs.benchmarks.models import build
from exspec.jobs.benchmarks.shapes import SHAPES, pair_names
from tests.tools.host import host_milliseconds

WINDOWS = 1, 3  # W in multiples of B
ROUNDS = 4  # whose waits are counted
ATTENTION, WEIGHING = torch.ops.exspec.attend_in_place.default, torch.ops.exspec.weigh_in_place.default
# Operations that launch no kernel, beside views.
FREE = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.lift_fresh", "aten.sym_")
# A fill and a copy; splits and their merging; these, a fill, a softmax in two kernels, a clean-up and a sum.
SEVERAL = {"aten.constant_pad_nd.default": 2, str(ATTENTION): 2, str(WEIGHING): 7}
PICKED = ("aten.embedding", "aten.index.", "aten.index_select", "aten.gather")  # read as much as they return


class Kernel(NamedTuple):
    """bytes: read and written, without the KV that attention reads."""

    name: str
    bytes: int


class Tally(TorchDispatchMode):
    """Counts kernels. calls: of attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.bytes = self.calls = 0
        self.counting = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.counting or function.namespace == "prim":
            return function(*args, **kwargs)
        with self:  # without gradients, composed operations arrive whole
            found = function.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        result = function(*args, **kwargs)
        if not (function.is_view or str(function).startswith(FREE)):
            self.add(Kernel(str(function), _operation_bytes(function, args, kwargs, result)))
        return result

    def add(self, kernel: Kernel) -> None:
        self.kernels[kernel.name] += SEVERAL.get(kernel.name, 1)
        self.bytes += kernel.bytes
        self.calls += kernel.name in (str(ATTENTION), str(WEIGHING))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before


def _operation_bytes(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    if function in (ATTENTION, WEIGHING):
        given = [given[0], given[3]]
    elif str(function).startswith(PICKED):
        given = [*given[1:], *made]
    elif str(function).startswith("aten.index_put"):
        given, made = given[1:], given[2:]
    return sum(t.nbytes for t in (*given, *made))


class Planned(BaseException):
    """Stops the compiler after fusing. Not an Exception: torch would treat it as a failure of the compiler."""


def kernels_of(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Kernel]:
    """The kernels that the compiler makes of a graph for a GPU."""
    found: list[Kernel] = []

    def plan(nodes: Any) -> Any:
        found.extend(Kernel(_name(node), _node_bytes(node)) for node in nodes if _launches(node))
        raise Planned

    # The compiler joins tensors where they are used, for a GPU only; force it.
    options: Any = {"cpu_backend": "triton", "force_pointwise_cat": True, "_post_fusion_custom_pass": plan}
    with compiler.patch(fx_graph_cache=False, **options):
        try:
            compile_fx_inner(graph, list(inputs))  # type: ignore[arg-type]
        except Planned:
            return found
    return found


def _launches(node: Any) -> bool:
    return type(node).__name__ != "NopKernelSchedulerNode" and type(node.node).__name__ != "MultiOutput"


def _name(node: Any) -> str:
    operation = getattr(node.node, "op_overload", None)
    return str(operation) if operation is not None else str(getattr(node.node, "python_kernel_name", None) or "fused")


def _node_bytes(node: Any) -> int:
    """Bytes that a node of the compiler's schedule reads and writes. Of a tensor that another tensor indexes, only the
    indexed elements count."""
    if _name(node) in (str(ATTENTION), str(WEIGHING)):
        query, *_, page_table = node.node.inputs[:4]
        return sum(prod(int(n) for n in t.get_size()) * t.get_dtype().itemsize for t in (query, query, page_table))
    total = 0
    for name, size in node.get_read_write_buffer_accesses(True, True).items():
        accesses = [d for d in (*node.read_writes.reads, *node.read_writes.writes) if d.name == name]
        if not node.is_extern() and all(isinstance(d, StarDep) for d in accesses):
            continue  # the node only waits for the tensor's writer
        if indirect := [d for d in accesses if d.is_indirect()]:
            itemsize = V.graph.get_dtype(name).itemsize
            size = min(size, itemsize * sum(prod(int(n) for n in d.size) for d in indirect))
        total += size
    return total


class Plans(Code):
    """Counts pieces by the compiler's plan, and runs them uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.plans: dict[Hashable, list[Kernel]] = {}

    def of(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
        key = graph.code, tuple((t.shape, t.stride(), t.dtype) for t in inputs)
        if key not in self.plans:
            self.plans[key] = kernels_of(graph, inputs)

        def run(given: list[Tensor]) -> Any:
            for kernel in self.plans[key]:
                self.tally.add(kernel)
            with self.tally.paused():
                return graph(*given)

        return run


class Cost(NamedTuple):
    """kernels: on the device. bytes: read and written, without the KV that attention reads. calls: of attention."""

    kernels: int
    bytes: int
    calls: int

    def extrapolated(self, next_layer: "Cost", layers: int) -> "Cost":
        """With `layers` layers more than `next_layer`, which has one layer more than this."""
        return Cost(*(b + layers * (b - a) for a, b in zip(self, next_layer, strict=True)))


def resolved(rows: int, window: int, capacity: int, drafted: int, kernels: Any) -> EngineConfig:
    """The config of an engine with attention in place, as `resolve` leaves it."""
    config = EngineConfig(batch_size=rows, window=window, draft_tokens=drafted, capacity=capacity, kernels=kernels)
    return replace(config, attention="in_place", pages=config.page_count, bucket=capacity)


def shaped(name: str, layers: int | None = None) -> PreTrainedModel:
    """A model of the shape in bfloat16, or its first layers. Call it where tensors have no values."""
    settings = dict(SHAPES[name])
    if layers is not None:
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, eos_token_id=None, pad_token_id=0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return made


class Pair:
    """A pair of models without values."""

    def __init__(self, target: str, draft: str) -> None:
        self.names = target, draft
        self.plans = Plans()
        with FakeTensorMode():
            self.models = shaped(target), shaped(draft)
        for name, model in zip(self.names, self.models, strict=True):
            if not alike(model):
                raise ValueError(f"the layers of {name} are not alike")

    def forwards(self, config: EngineConfig) -> tuple[Cost, Cost]:
        """The costs of a verify and of a whole draft."""
        costs = [self._of_layers(config, layers) for layers in (1, 2)]
        target, draft = self.models
        drafting = target if config.drafter == "sparse" else draft
        depths = [kv_shape(model.config)[0] for model in (target, drafting)]
        verify, draft = (one.extrapolated(two, depth - 2) for one, two, depth in zip(*costs, depths, strict=True))
        return verify, draft

    def _of_layers(self, config: EngineConfig, layers: int) -> tuple[Cost, Cost]:
        recorder = compiling(Recordings(lambda run: run), config)
        with FakeTensorMode(), patch.object(programs, "CODE", self.plans):
            target, draft = (shaped(name, layers) for name in self.names)
            parts = build_parts(target, draft, config, recorder)
            drafter: Any = parts.drafter
            choose = recorder.wrap(partial(Engine._choices, _engine(parts.target)))
            batch, rows = _inputs(config, torch.ones(config.batch_size, dtype=torch.long))
            return self._cost(partial(choose, batch, rows.sampler)), self._cost(partial(drafter._loop, rows))

    def _cost(self, forward: Callable[[], Any]) -> Cost:
        forward()  # the first run prepares, as before a recording
        self.plans.tally = tally = Tally()
        with tally:
            forward()
        return Cost(tally.kernels.total(), tally.bytes, tally.calls)


def alike(model: PreTrainedModel) -> bool:
    """Whether all layers of a model have weights of the same shapes and the same kind of attention."""
    shapes: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, weight in model.named_parameters():
        before, found, after = name.partition(".layers.")
        if found:
            number, _, rest = after.partition(".")
            shapes.setdefault(number, []).append((before + rest, weight.shape))
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["one"])
    return len(kinds) == 1 and all(found == shapes["0"] for found in shapes.values())


class ReadColumns:
    """A cached model that only counts the KV columns that its forwards read in place."""

    bytes = 0

    def __init__(self, pages: Pages) -> None:
        self.pages, self.count = pages, 0

    def forward(self, batch: Batch, keep: int = 0) -> Tensor:
        slots, tokens, starts, kv_columns = batch
        table, width = self.pages.table, tokens.shape[1]
        _, page_table, _ = locate(table, slots, starts, width, kv_columns, self.pages.size, table.shape[1])
        start, end = page_table[:, 0, 0, 0], page_table[:, 0, 0, 1]
        self.count += int(torch.where(end > 0, start + width, 0).clamp(min=0).sum())
        return torch.zeros(len(slots), keep or width, 2)

    def fill(self, batch: Batch) -> None:
        self.forward(batch)

    def check(self, lengths: dict[int, int]) -> None:
        self.pages.check(lengths)


def columns_read(config: EngineConfig, lengths: list[int]) -> tuple[int, int]:
    """KV columns that a verify reads, and a whole draft, if rows have these lengths."""
    pages = Pages(
        config.slots, config.page_count, config.page_size, config.prefill_columns, config.capacity + config.width,
        torch.device("cpu"),
    )  # fmt: skip
    for slot, length in enumerate(lengths):
        pages.begin(slot, [], 0, length + config.width, 0)
    verify, draft = ReadColumns(pages), ReadColumns(pages)
    batch, rows = _inputs(config, torch.tensor(lengths))
    Engine._choices(_engine(verify), batch, rows.sampler)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=2)))
    recorder = Recordings(lambda run: run)
    context: Any = SimpleNamespace(draft=model, target=model, config=config, recorder=recorder)
    DraftModel(context, model, draft)._draft(rows)
    return verify.count, draft.count


def draft_step(pair: Pair, config: EngineConfig) -> Cost:
    """The cost of one more drafted token, in a program of the drafter alone."""
    with patch.object(sparse, "attention_trial", lambda *_, **__: None):  # there is no device to try
        costs = [pair.forwards(replace(config, draft_tokens=k, columns=9))[1] for k in (2, 3)]
    return Cost(*(after - before for before, after in zip(*costs, strict=True)))


def budget_ratio(model: PreTrainedModel, config: EngineConfig, step: Cost, length: int) -> float:
    """The bytes that a draft step of rows of `length` tokens moves over those of the weights and the KV that it may
    read: the first page, the window and chosen tokens. model: the one that drafts."""
    size, table = config.page_size, torch.arange(config.capacity // config.page_size)[None]
    assert config.draft_window
    latest, tokens = torch.tensor([length]), config.draft_window + (config.draft_chosen or 0)
    recent = window_pages(config.draft_window, config.drafted, size)
    reads = recent_pages(table, latest, recent + (config.draft_chosen or 0) // size, size)
    slots, starts = torch.zeros(1, dtype=torch.long), latest
    _, page_table, _ = locate(table.repeat(2, 1), slots, starts, 1, config.capacity, size, 0, reads)
    columns, rows = int(page_table[0, 0, 0, 0]) + 1, config.batch_size
    sizes = Sizes.of(model.config, model.dtype)
    moved = step.bytes + rows * columns * sizes.kv + split_bytes(model.config, [columns] * rows, [1])
    return moved / (sizes.read + rows * (tokens + size) * sizes.kv)


def _inputs(config: EngineConfig, starts: Tensor) -> tuple[Batch, DraftRows]:
    """The input of a verify and of a whole greedy draft. starts: [B]."""
    rows, device = config.batch_size, torch.device("cpu")
    slots, ones = torch.arange(rows), torch.ones(rows, dtype=torch.long)
    sampler = Sampler([Sampling()] * rows, [[0]] * rows, device)
    batch = Batch(slots, torch.ones(rows, config.width, dtype=torch.long), starts, config.capacity)
    limits = torch.full_like(ones, config.drafted)
    return batch, DraftRows(slots, ones, ones, starts, limits, sampler, config.drafted, config.capacity, None, None)


def draft_widths(config: EngineConfig) -> list[int]:
    """Columns of the forwards of a whole draft: the first feeds the last two tokens."""
    return [2] + [1] * (config.drafted - 1)


def _engine(target: CachedModel) -> Any:
    """As much of an engine as choosing tokens needs."""
    return SimpleNamespace(target=target, picks=pick)


def split_bytes(model: PretrainedConfig, lengths: list[int], widths: list[int]) -> int:
    """Bytes of the partial results that attention writes and reads again, in forwards of so many columns."""
    layers, _, size = kv_shape(model)
    split = tiling(size, torch.bfloat16).split
    queries = sum(width * -(-(length + width) // split) for width in widths for length in lengths)
    return 2 * queries * layers * model.get_text_config().num_attention_heads * (size + 2) * torch.float32.itemsize


def bytes_ratio(pair: Pair, config: EngineConfig, costs: tuple[Cost, Cost], lengths: list[int]) -> float:
    """The bytes that a round moves over the bytes that it needs, with rows of these lengths. costs: of its forwards.

    Moved: everything that the kernels read and write. Needed: for each forward, the model's weights once and the KV of
    the rows.
    """
    moved = needed = 0.0
    columns = columns_read(config, lengths)
    widths = [config.width], draft_widths(config)
    for model, cost, read, forwards in zip(pair.models, costs, columns, widths, strict=True):
        sizes = Sizes.of(model.config, model.dtype)
        moved += cost.bytes + read * sizes.kv + split_bytes(model.config, lengths, forwards)
        needed += len(forwards) * (sizes.read + sum(lengths) * sizes.kv)
    return moved / needed


def random_lengths(rows: int, longest: int, drafted: int) -> list[int]:
    """Cached tokens of the rows, which leave room for one more round."""
    rng = random.Random(rows)
    return [rng.randint(1, longest - drafted - 1) for _ in range(rows)]


class HostReads(TorchFunctionMode):
    """Counts the times that Python waits for a tensor. A HostCopy counts once, and its tensors no more."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.on_host: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.tolist, Tensor.cpu):
            self.count += not any(args[0] is tensor for tensor in self.on_host)
        return function(*args, **(kwargs or {}))

    def wait(self, copy: HostCopy) -> list[Tensor]:
        """Stands in for HostCopy.wait."""
        self.count += 1
        copies = [tensor.clone() for tensor in copy.tensors]
        self.on_host += copies
        return copies


def every_other_forced() -> Constraint:
    """A choice of two tokens, then a forced token, and so on."""
    choice, must = Node(), Node()
    choice.children, must.children = {1: must, 2: must}, {3: choice}
    return Automaton(choice)


def waits(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    constraint: MakeConstraint | None = None,
    rows: int = 4,
    drafted: int = 5,
) -> int:
    """How often a greedy round waits for the device, at most. Nothing is admitted meanwhile."""
    config = EngineConfig(batch_size=rows, window=rows, draft_tokens=drafted, capacity=256, attention="gathered")
    engine = Engine(target, draft, config, frozenset(), Recordings(lambda run: run))
    for i in range(rows):
        prompt, most = list(range(1, 9 + i)), (ROUNDS + 2) * (drafted + 1)
        engine.submit(Request(i, prompt, most, constraint=constraint))
    engine.step()
    return max(_waits_of(engine.step) for _ in range(ROUNDS))


def _waits_of(step: Callable[[], None]) -> int:
    reads = HostReads()
    with reads, Waits() as operations, patch.object(HostCopy, "wait", lambda copy: reads.wait(copy)):
        step()
    return reads.count + len(operations.names)


def count(
    names: str, drafted: int = 5, batches: tuple[tuple[int, int], ...] = ((8, 512), (32, 1024), (64, 1024))
) -> dict[str, Any]:
    """All figures but the host's. names: TARGET:DRAFT. batches: B, and the tokens of its longest row.

    verify_kernels, draft_kernels: of one verify and of a whole draft, with the choice of tokens and the copies of a
    recording's input and output. before: the same without compiling. bytes_ratio: see
    `bytes_ratio`, by B and W. waits: how often a round waits for the device.
    """
    pair = Pair(*pair_names(names))
    rows, longest = batches[0]
    shape = partial(resolved, drafted=drafted)
    config = shape(rows, rows, longest, kernels="compiled")
    verify, draft = pair.forwards(config)
    before = pair.forwards(replace(config, kernels="eager"))
    ratios: dict[str, dict[str, float]] = {}
    small = build("tiny", torch.float32, "cpu"), build("tiny", torch.float32, "cpu")
    for rows, longest in batches:
        lengths = random_lengths(rows, longest, drafted)
        ratios[str(rows)] = {}
        for window in (times * rows for times in WINDOWS):
            config = shape(rows, window, longest, kernels="compiled")
            ratios[str(rows)][str(window)] = round(bytes_ratio(pair, config, pair.forwards(config), lengths), 4)
    return {
        "verify_kernels": verify.kernels,
        "draft_kernels": draft.kernels,
        "before": {"verify_kernels": before[0].kernels, "draft_kernels": before[1].kernels},
        "bytes_ratio": ratios,
        "waits": {"greedy": waits(*small), "constrained": waits(*small, every_other_forced)},
    }


def main(names: str) -> None:
    """Count, and print the figures as one line of JSON."""
    print(json.dumps(count(names) | {"host_ms": host_milliseconds()}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.tools.count TARGET:DRAFT")
    main(sys.argv[1])
