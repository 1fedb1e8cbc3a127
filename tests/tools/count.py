"""`python -m tests.tools.count TARGET:DRAFT`: what a round costs, counted without a GPU.

The engine's own forwards run on tensors that have shapes and no values. What is compiled is handed to the compiler with
the rules by which it fuses for a GPU, and counted before code is written for it; what is not compiled is an operation
at a time, and each that is no view is a kernel. So is each that attention takes beside its own kernel.

A forward's kernels are counted on the first layers, and multiplied: all layers of a model are alike.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._inductor.config as compiler
from torch import Tensor, fx
from torch._inductor.dependencies import StarDep
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.engine.drafters.draft_length import Unasked
from exspec.actors.engine.drafters.model import DraftModel
from exspec.actors.engine.graphs import Recordings
from exspec.actors.engine.kv.attention import attend_varlen
from exspec.actors.engine.kv.cached_model import CachedModel, kv_shape, where
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.layers.fused import Code, Run, compiled_by
from exspec.actors.engine.methods import build as build_parts
from exspec.actors.engine.tokens.constraint import Automaton, Constraint, MakeConstraint, Node
from exspec.actors.engine.tokens.sampling import Sampler
from exspec.jobs.benchmarks.synthetic import SHAPES, build, kv_bytes, model_bytes

WINDOWS = 1, 3  # W, in B
ROUNDS = 4  # in which waits are counted
ATTENTION = torch.ops.exspec.attend_in_place.default
# Operations that launch nothing, beside views.
FREE = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.lift_fresh", "aten.sym_")
SEVERAL = {"aten.constant_pad_nd.default": 2}  # a fill and a copy
PICKED = ("aten.embedding", "aten.index.", "aten.index_select", "aten.gather")  # read as much as they give
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2"}


class Kernel(NamedTuple):
    """bytes: read and written, but for the KV that attention reads."""

    name: str
    bytes: int


class Tally(TorchDispatchMode):
    """Counts kernels. calls: of attention, each of which is a kernel of its own here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.bytes = self.calls = 0
        self.counting = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.counting or function.namespace == "prim":
            return function(*args, **kwargs)
        with self:  # where nothing is differentiated, composed operations come whole
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
        self.calls += kernel.name == str(ATTENTION)

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
    if function is ATTENTION:
        given = [given[0], given[3]]
    elif str(function).startswith(PICKED):
        given = [*given[1:], *made]
    elif str(function).startswith("aten.index_put"):
        given, made = given[1:], given[2:]
    return sum(t.nbytes for t in (*given, *made))


class Planned(BaseException):
    """The compiler has fused, and is not to go on. No Exception: those are taken for faults of the compiler."""


def kernels_of(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Kernel]:
    """The kernels that the compiler makes of a graph for a GPU."""
    found: list[Kernel] = []

    def plan(nodes: Any) -> Any:
        found.extend(Kernel(_name(node), _node_bytes(node)) for node in nodes if _launches(node))
        raise Planned

    # On a GPU parts that are joined are computed where they are used; for a CPU that is off.
    options: Any = {"cpu_backend": "triton", "force_pointwise_cat": True, "_post_fusion_custom_pass": plan}
    with compiler.patch(fx_graph_cache=False, **options):
        try:
            torch._inductor.compile(graph, list(inputs))
        except Planned:
            return found
    return found


def _launches(node: Any) -> bool:
    return type(node).__name__ != "NopKernelSchedulerNode" and type(node.node).__name__ != "MultiOutput"


def _name(node: Any) -> str:
    operation = getattr(node.node, "op_overload", None)
    return str(operation) if operation is not None else str(getattr(node.node, "python_kernel_name", None) or "fused")


def _node_bytes(node: Any) -> int:
    """What a node of the compiler's schedule reads and writes. Where a tensor's values tell the place, it is as much as
    there are places, not the whole tensor that they lie in."""
    if _name(node) == str(ATTENTION):
        query, *_, places = node.node.inputs[:4]
        return sum(prod(int(n) for n in t.get_size()) * t.get_dtype().itemsize for t in (query, query, places))
    total = 0
    for name, size in node.get_read_write_buffer_accesses(True, True).items():
        accesses = [d for d in (*node.read_writes.reads, *node.read_writes.writes) if d.name == name]
        if not node.is_extern() and all(isinstance(d, StarDep) for d in accesses):
            continue  # it comes after what wrote the tensor, and reads nothing of it
        if indirect := [d for d in accesses if d.is_indirect()]:
            itemsize = V.graph.get_dtype(name).itemsize
            size = min(size, itemsize * sum(prod(int(n) for n in d.size) for d in indirect))
        total += size
    return total


class Plans(Code):
    """Compiles nothing: pieces run as they are, and are counted by the compiler's plan."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.plans: dict[Hashable, list[Kernel]] = {}

    def of(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
        key = graph.code, tuple((t.shape, t.stride(), t.dtype) for t in inputs)
        if key not in self.plans:
            self.plans[key] = kernels_of(graph, inputs)

        def run(*given: Tensor) -> Any:
            for kernel in self.plans[key]:
                self.tally.add(kernel)
            with self.tally.paused():
                return graph(*given)

        return run


@dataclass(frozen=True)
class Cost:
    """kernels: on the device. bytes: read and written, without the KV that attention reads. calls: of attention."""

    kernels: int
    bytes: int
    calls: int

    def grown(self, more: "Cost", times: int) -> "Cost":
        """With `times` layers more, `more` being this with one more."""
        kernels, size, calls = (b + times * (b - a) for a, b in zip(_numbers(self), _numbers(more), strict=True))
        return Cost(kernels, size, calls)


def _numbers(cost: Cost) -> tuple[int, int, int]:
    return cost.kernels, cost.bytes, cost.calls


def attention_kernels(model: PretrainedConfig, config: EngineConfig, widths: list[int]) -> int:
    """Kernels that attention in place launches on CUDA beside torch's own, in forwards of so many columns: what the
    layers of a forward share, and what each layer needs."""
    layers = kv_shape(model)[0]
    found = 0
    for width in widths:
        first, again = _attention_kernels(model, config, width)
        found += first - 1 + (layers - 1) * (again - 1)
    return found


def _attention_kernels(model: PretrainedConfig, config: EngineConfig, width: int) -> tuple[int, int]:
    """Kernels of the first and of a later call of a forward, torch's own counted as one."""
    _, kv_heads, size = kv_shape(model)
    heads = model.get_text_config().num_attention_heads
    with FakeTensorMode():
        query = torch.empty(config.batch_size, width, heads, size, dtype=torch.bfloat16).transpose(1, 2)
        store = torch.empty(config.page_count, config.page_size, kv_heads, size, dtype=torch.bfloat16)
        places = torch.empty(config.batch_size, 1, 1, 2 + config.fewest_pages, dtype=torch.int32)
        found = []
        for _ in range(2):
            with Tally() as tally:
                attend_varlen(query, store, store, places, 1.0, 0)
            found.append(int(tally.kernels.total()))
    return found[0], found[1]


def settled(rows: int, window: int, capacity: int, drafted: int, kernels: Any) -> EngineConfig:
    """The config of an engine that attends in place, as `settle` leaves it."""
    config = EngineConfig(batch_size=rows, window=window, draft_tokens=drafted, capacity=capacity, kernels=kernels)
    return replace(config, attention="in_place", pages=config.page_count, bucket=capacity)


def shaped(name: str, layers: int | None = None) -> PreTrainedModel:
    """A model of the shape in bfloat16, to be made where tensors have no values; of its first layers if a number is
    given."""
    settings = dict(SHAPES[name])
    if layers is not None:
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, eos_token_id=None, pad_token_id=0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return made


class Pair:
    """Shapes of a pair of models."""

    def __init__(self, target: str, draft: str) -> None:
        self.names = target, draft
        self.plans = Plans()
        with FakeTensorMode():
            self.models = shaped(target), shaped(draft)
        for name, model in zip(self.names, self.models, strict=True):
            if not alike(model):
                raise ValueError(f"the layers of {name} are not alike")

    def forwards(self, config: EngineConfig) -> tuple[Cost, Cost]:
        """What a verify and a whole draft cost."""
        costs = [self._of_layers(config, layers) for layers in (1, 2)]
        depths = [kv_shape(model.config)[0] for model in self.models]
        verify, draft = (one.grown(two, depth - 2) for one, two, depth in zip(*costs, depths, strict=True))
        return verify, draft

    def _of_layers(self, config: EngineConfig, layers: int) -> tuple[Cost, Cost]:
        recorder = Recordings(lambda run: run)
        with FakeTensorMode(), compiled_by(self.plans):
            target, draft = (shaped(name, layers) for name in self.names)
            parts = build_parts(target, draft, config, recorder)
            drafter: Any = parts.drafter
            choose = recorder.wrap(partial(Engine._choices, _engine(parts.target)))
            slots, ones, tokens, sampler = _rows(config)
            drafted, capacity = config.drafted, config.capacity
            return (
                self._cost(partial(choose, slots, tokens, ones, sampler, capacity), config, target, [config.width]),
                self._cost(
                    partial(drafter._loop, slots, ones, ones, ones, ones, sampler, drafted, capacity),
                    config,
                    draft,
                    [2] + [1] * (drafted - 1),
                ),
            )

    def _cost(
        self, forward: Callable[[], Any], config: EngineConfig, model: PreTrainedModel, widths: list[int]
    ) -> Cost:
        """widths: columns of each forward of the model in it."""
        forward()  # as a recording does first
        self.plans.tally = tally = Tally()
        with tally:
            forward()
        beside = attention_kernels(model.config, config, widths)
        return Cost(tally.kernels.total() + beside, tally.bytes, tally.calls)


def alike(model: PreTrainedModel) -> bool:
    """Whether all layers of a model have weights of the same shapes, and attend alike."""
    shapes: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, weight in model.named_parameters():
        before, number, after = name.partition(".layers.")
        if number:
            place, _, rest = after.partition(".")
            shapes.setdefault(place, []).append((before + rest, weight.shape))
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["one"])
    return len(kinds) == 1 and all(found == shapes["0"] for found in shapes.values())


class Places:
    """Stands where a cached model does, and notes how many KV columns its forwards read in place."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.read: list[int] = []

    def forward(
        self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int, keep: int = 0, first: int = 0
    ) -> Tensor:
        assert not first
        width, entries = tokens.shape[1], self.pages.table.shape[1]
        _, places, _ = where(self.pages.table, slots, starts, width, attended, self.pages.size, entries)
        start, end = places[:, 0, 0, 0], places[:, 0, 0, 1]
        self.read.append(int(torch.where(end > 0, start + width, 0).clamp(min=0).sum()))
        return torch.zeros(len(slots), keep or width, 2)

    def fill(self, slots: Tensor, tokens: Tensor, starts: Tensor, attended: int) -> None:
        self.forward(slots, tokens, starts, attended)

    def check(self, lengths: dict[int, int]) -> None:
        self.pages.check(lengths)

    @property
    def bytes(self) -> int:
        return 0


def columns_read(config: EngineConfig, lengths: list[int]) -> tuple[int, int]:
    """KV columns that a verify reads, and those of all forwards of a draft, where rows have these lengths."""
    pages = Pages(
        config.slots, config.page_count, config.page_size, config.prefill_columns, config.capacity + config.width,
        torch.device("cpu"),
    )  # fmt: skip
    for slot, length in enumerate(lengths):
        pages.begin(slot, [], 0, length + config.width)
    verify, draft = Places(pages), Places(pages)
    slots, ones, tokens, sampler = _rows(config)
    starts = torch.tensor(lengths)
    Engine._choices(_engine(verify), slots, tokens, starts, sampler, config.capacity)
    drafter: Any = DraftModel(draft, (2, 2), config.capacity, 1, Unasked(), Recordings(lambda run: run))
    drafter._draft(slots, ones, ones, starts, ones, sampler, config.drafted, config.capacity)
    return sum(verify.read), sum(draft.read)


def _rows(config: EngineConfig) -> tuple[Tensor, Tensor, Tensor, Sampler]:
    """Slots [B], ones [B], tokens [B, K + 1] and what chooses the likeliest."""
    rows = config.batch_size
    tokens = torch.ones(rows, config.width, dtype=torch.long)
    sampler = Sampler([Sampling()] * rows, [[0]] * rows, torch.device("cpu"))
    return torch.arange(rows), torch.ones(rows, dtype=torch.long), tokens, sampler


def _engine(target: CachedModel) -> Any:
    """As much of an engine as choosing tokens needs."""
    return SimpleNamespace(target=target, device=torch.device("cpu"))


def bytes_ratio(pair: Pair, config: EngineConfig, costs: tuple[Cost, Cost], lengths: list[int]) -> float:
    """Bytes that a round moves, over those that it cannot do without, with rows of these lengths; costs: of its
    forwards.

    Moved is what every kernel reads and writes: weights, activations, logits, and the KV columns that the rows' places
    name. Needed are, for each forward, its model's weights once and the KV of the rows' lengths.
    """
    moved = needed = 0
    columns = columns_read(config, lengths)
    for model, cost, read, forwards in zip(pair.models, costs, columns, (1, config.drafted), strict=True):
        moved += cost.bytes + read * kv_bytes(model)
        needed += forwards * (model_bytes(model) + sum(lengths) * kv_bytes(model))
    return moved / needed


def random_lengths(rows: int, longest: int, drafted: int) -> list[int]:
    """Tokens that rows have cached, with room for a round more."""
    rng = random.Random(rows)
    return [rng.randint(1, longest - drafted - 1) for _ in range(rows)]


class Watch(TorchDispatchMode):
    """Counts operations whose result Python waits for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += function.overloadpacket.__name__ in WAITS
        return function(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Counts copies to Python and to the host, which on a CPU are no operations."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.waits += function in (Tensor.tolist, Tensor.cpu)
        return function(*args, **(kwargs or {}))


def every_other_forced() -> Constraint:
    """One of two tokens, then one that must come, and so on."""
    free, must = Node(), Node()
    free.children, must.children = {1: must, 2: must}, {3: free}
    return Automaton(free)


def waits(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    constraint: MakeConstraint | None = None,
    rows: int = 4,
    drafted: int = 5,
) -> int:
    """The most times that a greedy round waits for the device, while nothing is admitted."""
    config = EngineConfig(batch_size=rows, window=rows, draft_tokens=drafted, capacity=256, attention="gathered")
    engine = Engine(target, draft, config, frozenset(), Recordings(lambda run: run))
    for i in range(rows):
        prompt, most = list(range(1, 9 + i)), (ROUNDS + 2) * (drafted + 1)
        engine.submit(Request(i, prompt, most, constraint=constraint))
    engine.step()
    found: list[int] = []
    for _ in range(ROUNDS):
        with Watch() as watch, Calls(watch):
            engine.step()
        found.append(watch.waits)
    return max(found)


@dataclass(frozen=True)
class Settings:
    """pair: TARGET:DRAFT. batches: longest row by B."""

    pair: str
    draft_tokens: int = 5
    batches: tuple[tuple[int, int], ...] = ((8, 512), (32, 1024), (64, 1024))

    def __post_init__(self) -> None:
        target, _, draft = self.pair.partition(":")
        for name in (target, draft):
            if name not in SHAPES:
                raise ValueError(f"no shape {name!r}; expected TARGET:DRAFT of {', '.join(SHAPES)}")


def count(settings: Settings) -> dict[str, Any]:
    """All figures but the host's.

    verify_kernels, draft_kernels: device kernels of one verify and of a whole draft, with the choice of tokens and the
    copies of what a recording is given and gives; `before` with layers that are not compiled. of_attention: those among
    them that prepare what attention takes. bytes_ratio: by B and W, what all kernels of a round read and write, over
    the weights and the KV that its forwards must read once each. waits: times that a round waits for the device.
    """
    target, _, draft = settings.pair.partition(":")
    pair = Pair(target, draft)
    rows, longest = settings.batches[0]
    shape = partial(settled, drafted=settings.draft_tokens)
    verify, drafted = pair.forwards(shape(rows, rows, longest, kernels="compiled"))
    before = pair.forwards(shape(rows, rows, longest, kernels="eager"))
    config = shape(rows, rows, longest, kernels="compiled")
    widths = {"verify": [config.width], "draft": [2] + [1] * (config.drafted - 1)}
    beside = {n: attention_kernels(m.config, config, w) for m, (n, w) in zip(pair.models, widths.items(), strict=True)}
    ratios: dict[str, dict[str, float]] = {}
    small = build("tiny", torch.float32, "cpu"), build("tiny", torch.float32, "cpu")
    for rows, longest in settings.batches:
        lengths = random_lengths(rows, longest, settings.draft_tokens)
        ratios[str(rows)] = {}
        for window in (times * rows for times in WINDOWS):
            config = shape(rows, window, longest, kernels="compiled")
            ratios[str(rows)][str(window)] = round(bytes_ratio(pair, config, pair.forwards(config), lengths), 4)
    return {
        "verify_kernels": verify.kernels,
        "draft_kernels": drafted.kernels,
        "of_attention": beside,
        "before": {"verify_kernels": before[0].kernels, "draft_kernels": before[1].kernels},
        "bytes_ratio": ratios,
        "waits": {"greedy": waits(*small), "constrained": waits(*small, every_other_forced)},
    }


def run(settings: Settings) -> None:
    """Count, and print: a table, and last a line with one JSON object."""
    from rich.console import Console
    from rich.table import Table

    from tests.tools.host import host_milliseconds

    found = count(settings) | {"host_ms": host_milliseconds()}
    table = Table(title=f"a round of {settings.pair}, K={settings.draft_tokens}")
    for name in ("", "counted", "before"):
        table.add_column(name)
    rows = settings.batches[0][0]
    for name in ("verify", "draft"):
        kernels = f"{name}_kernels"
        table.add_row(f"kernels of a {name}, B={rows}", str(found[kernels]), str(found["before"][kernels]))
        table.add_row("  of them to prepare attention", str(found["of_attention"][name]), "")
    for size, windows in found["bytes_ratio"].items():
        for window, ratio in windows.items():
            table.add_row(f"bytes moved / needed, B={size}, W={window}", str(ratio), "")
    for name, number in found["waits"].items():
        table.add_row(f"waits of a round, {name}", str(number), "")
    for name, number in found["host_ms"].items():
        table.add_row(f"ms of the host in a round, {name}", str(number), "")
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.tools.count TARGET:DRAFT")
    run(Settings(sys.argv[1]))
