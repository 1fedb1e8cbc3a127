"""A target whose layers lie on several devices of one process.

Everything but the layers stays on the first device: token embeddings, output head, choice of tokens, drafter. A
forward visits the devices in turn. Only hidden states cross, and where their tokens lie. So as many rounds can be under
way as there are devices, and each device works on another one. No sum changes: the tokens are those of one device.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel

from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.graphs import Eager, Recorder
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import Located, PagedModel
from exspec.actors.engine.kv.forward import Filled, Left
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.layers.spans import layers_of

LAYERS = "device_layers"  # attribute of a target's configuration: how many of its layers each device has


@dataclass(frozen=True)
class Split:
    """devices: of a target, the first of which also holds what is no layer. layers: how many each one has, at least
    one."""

    devices: tuple[torch.device, ...]
    layers: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Split | None":
        """How a model is split; None if it is on one device."""
        counts = layer_counts(model.config)
        if counts is None:
            return None
        layers = layers_of(model)
        return cls(tuple(next(layers[part.start].parameters()).device for part in _parts(counts)), counts)

    @property
    def parts(self) -> Iterator[range]:
        """The numbers of each device's layers."""
        return _parts(self.layers)


def layer_counts(config: PretrainedConfig) -> tuple[int, ...] | None:
    """How many layers of a target each device has; None if it is on one device."""
    counts = getattr(config, LAYERS, None)
    return None if counts is None else tuple(counts)


def spread(target: PretrainedConfig, config: EngineConfig) -> EngineConfig:
    """The config with as many rounds under way as the target has devices.

    Raises ValueError for a method that does not work on several devices.
    """
    counts = layer_counts(target)
    if counts is None:
        return config
    if config.method == "eqspec":
        raise ValueError("method eqspec moves the KV of whole rows; expected exspec or plain on several devices")
    overlap = config.exact if config.overlap is None else config.overlap
    return replace(config, devices=len(counts), overlap=overlap, kernels="eager")


def place(model: PreTrainedModel, split: Split) -> None:
    """Move a model's layers to their devices, and all else to the first one."""
    layers, first = layers_of(model), split.devices[0]
    if len(layers) != sum(split.layers) or min(split.layers) < 1:
        raise ValueError(
            f"expected one layer or more per device, {len(layers)} together, not {' + '.join(map(str, split.layers))}"
        )
    setattr(model.config, LAYERS, list(split.layers))
    for device, part in zip(split.devices, split.parts, strict=True):
        for number in part:
            layers[number].to(device)
    _move(_rest(model), first)
    if len(set(split.devices)) > 1:  # so that the model's own forward works too
        for layer in layers:
            layer.register_forward_pre_hook(_here, with_kwargs=True)
        layers[-1].register_forward_hook(lambda _, __, out: _on(first, out))


def _parts(counts: Sequence[int]) -> Iterator[range]:
    return (range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))


def _rest(model: nn.Module) -> list[nn.Module]:
    """The modules outside the layers."""
    inside = {id(module) for layer in layers_of(model) for module in layer.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def _move(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = tensor.data.to(device)  # tied ones stay tied


def _here(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return _on(next(layer.parameters()).device, (args, kwargs))


def _on(device: torch.device, values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


States = tuple[Tensor, Located]  # hidden states [R, Q, D], and where their tokens are


@dataclass(frozen=True)
class InFlight:
    """A forward on its way through the devices. states: on the last device. located: on the first one."""

    states: "Future[States]"
    located: Located


class Stage(PagedModel):
    """The layers of one device, with their KV. part: the numbers of the layers."""

    def __init__(self, model: PreTrainedModel, pages: Pages, attention: str, part: range, device: torch.device) -> None:
        super().__init__(model, pages, attention, part=part, device=device)
        self.part, self.device = part, device
        for layer in layers_of(self.model):
            layer._forward_pre_hooks.clear()  # the stage moves what its layers read
            layer._forward_hooks.clear()
        self.use_gates()
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        large = {id(module) for end in ends if end is not None for module in end.modules()}
        for module in _rest(self.model) if part.start else []:
            if id(module) not in large:  # they are of the first device
                _copy(module, device)

    @torch.inference_mode()
    def run(self, given: Tensor, located: Located, fills: bool) -> Tensor | None:
        """The hidden states [R, Q, D] after this stage's layers; None of a fill. given: token ids [R, Q] for the first
        stage, hidden states for others."""
        first, last = self.part.start, self.part.stop
        forward = self.forward_of(located, first, last, fills, entering=given if first else None, stops=True)
        try:
            self.apply(located, forward, **{"inputs_embeds" if first else "input_ids": given})
        except Left as left:
            return left.hidden
        except Filled:
            return None
        raise AssertionError("layers returned without leaving")

    @torch.inference_mode()
    def head(self, hidden: Tensor, located: Located) -> Tensor:
        """Logits [R, Q, V] of the hidden states after the last layer."""
        count = len(self.keys)
        forward = self.forward_of(located, count, count, False, entering=hidden)
        logits: Tensor = self.apply(located, forward, inputs_embeds=hidden).logits
        return logits


class Lane:
    """What one device computes, in order. A GPU queues its work itself; for a CPU, a thread does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.thread = ThreadPoolExecutor(1, "exspec-device") if device.type == "cpu" else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        if self.thread is not None:
            return self.thread.submit(function, *arguments)
        done: Future[Any] = Future()
        with torch.cuda.device(self.device):
            done.set_result(function(*arguments))
        return done

    def bring(self, values: Any) -> Any:
        """The values with tensors on this device."""
        if self.stream is None:
            return _on(self.device, values)
        # A copy waits for the current streams of both devices. This stream is idle, so neither waits for a later round.
        with torch.cuda.stream(self.stream):
            moved = tree_map_only(Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), values)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(current), moved)
        return moved


class SplitModel:
    """A target with KV on several devices. `start` begins a forward, which `head` ends; others may run in between.

    One thread calls it. The first device computes in this thread. `arrived` raises what a device has raised, in this
    forward or in an earlier one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        split: Split,
        pages: Pages,
        attention: str,
        recorder: Callable[[torch.device], Recorder] = lambda _: Eager(),
    ) -> None:
        self.pages = pages
        self.stages = [
            Stage(model, pages, attention, part, device)
            for part, device in zip(split.parts, split.devices, strict=True)
        ]
        self.first, self.model = self.stages[0], self.stages[0].model
        self.home, *self.lanes = [Lane(device) for device in split.devices]
        self._begin = recorder(self.first.device).wrap(self._through_first)
        self._runs = [recorder(stage.device).wrap(stage.run) for stage in self.stages[1:]]
        self.failed: BaseException | None = None

    @property
    def adapters(self) -> Tensor | None:
        """As in `PagedModel`."""
        return self.first.adapters

    @adapters.setter
    def adapters(self, by_slot: Tensor) -> None:
        self.first.adapters = by_slot

    def start(self, batch: Batch, fills: bool = False) -> InFlight:
        """Begin to feed a batch's tokens. fills: only for their KV."""
        hidden, located = self._begin(batch)
        before: Future[Any] = Future()
        before.set_result((hidden, located))
        for lane, run in zip(self.lanes, self._runs, strict=True):
            before = lane.submit(self._step, lane, run, before, fills and lane is self.lanes[-1])
        return InFlight(before, located)

    def forward(self, batch: Batch) -> Tensor:
        """Feed a batch's tokens from start to end. Returns logits [R, Q, V]."""
        return self.head(self.arrived(self.start(batch)))

    def fill(self, batch: Batch) -> None:
        """Feed tokens only for their KV."""
        self.start(batch, fills=True)

    def arrived(self, started: InFlight) -> States:
        """Wait for a forward that was started."""
        hidden, _ = started.states.result()
        return self.home.bring(hidden), started.located

    def head(self, states: States) -> Tensor:
        """Logits [R, Q, V]."""
        return self.first.head(*states)

    def finish(self) -> None:
        """Wait until every device has computed what was started. Raises what one of them has raised."""
        for lane in self.lanes:
            lane.submit(lambda: None).result()
            if lane.device.type == "cuda":
                torch.cuda.synchronize(lane.device)
        if self.failed is not None:
            raise self.failed

    def check(self, lengths: dict[int, int]) -> None:
        self.finish()
        for stage in self.stages:
            stage.check(lengths)

    def _through_first(self, batch: Batch) -> tuple[Tensor | None, Located]:
        located = self.first.located(batch)
        return self.first.run(batch.tokens, located, False), located

    def _step(self, lane: Lane, run: Callable[..., Any], before: "Future[States]", fills: bool) -> Any:
        """Run a stage. Everything comes from the device before: a copy from another one would make it wait."""
        if self.failed is not None:  # a forward may need the KV of the one that failed
            raise self.failed
        try:
            hidden, located = lane.bring(before.result())
            return run(hidden, located, fills), located
        except BaseException as error:
            self.failed = error
            raise


def _copy(module: nn.Module, device: torch.device) -> None:
    """Give a module its own parameters and buffers, on a device."""
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(parameter.to(device), requires_grad=False))
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
