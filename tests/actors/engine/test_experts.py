"""Mixtures of experts: windows compute what the experts are, no neighbour changes a bit, and the check at load."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto import AutoModelForCausalLM

from exspec.actors import exactness
from exspec.actors.engine import Engine, EngineConfig
from exspec.actors.engine.layers import experts
from exspec.actors.exactness import check_forward, choose_experts
from exspec.actors.source import ModelError
from tests import tiny

EXPERTS, CHOSEN, HIDDEN, INNER = 6, 2, 256, 192
HALF = (torch.bfloat16, torch.float16)


def module(dtype: torch.dtype = torch.float32, **flags: bool) -> Any:
    """A family's experts as in transformers, with random weights."""
    torch.manual_seed(0)
    usual = {"is_transposed": False, "has_bias": False, "has_gate": True, "has_post_expert_norm": False}
    made: Any = SimpleNamespace(num_experts=EXPERTS, act_fn=silu, post_expert_norm=lambda x: 3 * x, **usual | flags)
    up = 2 * INNER if made.has_gate else INNER
    for name, out, into in (("gate_up_proj" if made.has_gate else "up_proj", up, HIDDEN), ("down_proj", HIDDEN, INNER)):
        shape = (EXPERTS, into, out) if made.is_transposed else (EXPERTS, out, into)
        setattr(made, name, (torch.randn(shape) / into**0.5).to(dtype))
        setattr(made, f"{name}_bias", torch.randn(EXPERTS, out).to(dtype))
    made._apply_gate = lambda x: silu(x[..., ::2]) * x[..., 1::2]
    return made


def by_hand(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One token and expert at a time."""
    out = torch.zeros_like(hidden)
    for token, place in product(range(len(hidden)), range(CHOSEN)):
        expert, x = int(index[token, place]), hidden[token]
        for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"):
            weight = getattr(self, name)[expert]
            x = x @ weight if self.is_transposed else weight @ x
            x = x + getattr(self, f"{name}_bias")[expert] if self.has_bias else x
            if name != "down_proj":
                x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = self.post_expert_norm(x) if self.has_post_expert_norm else x
        out[token] += weights[token, place] * x
    return out


def routed(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :CHOSEN]
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    return hidden, index, torch.rand(tokens, CHOSEN, generator=generator).to(dtype)


@pytest.mark.parametrize("flag", ["", "is_transposed", "has_bias", "has_post_expert_norm", "has_gate"])
@pytest.mark.parametrize("tokens", [1, 3, 40, 200])
def test_windows_equal_one_token_and_expert_at_a_time(tokens: int, flag: str) -> None:
    made = module(**({flag: flag != "has_gate"} if flag else {}))
    given = routed(tokens)
    assert torch.allclose(experts.windowed_experts(made, *given), by_hand(made, *given), atol=1e-4)


def test_all_tokens_may_go_to_one_expert() -> None:
    hidden, _, weights = routed(40)
    index = torch.tensor([[5, 0]]).expand(40, 2)
    made = module()
    found = experts.windowed_experts(made, hidden, index, weights)
    assert torch.allclose(found, by_hand(made, hidden, index, weights), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("tokens", [4, 24, 128])
def test_no_bit_of_a_token_depends_on_the_routing_of_others(tokens: int, dtype: torch.dtype) -> None:
    made = module(dtype)
    hidden, index, weights = routed(tokens, dtype)
    expected = experts.windowed_experts(made, hidden, index, weights)[0]
    crowds = [index[:1].expand(tokens, -1), (index[:1] + 1).expand(tokens, -1) % EXPERTS]
    for others in (*crowds, *(routed(tokens, seed=seed)[1] for seed in range(1, 9))):
        beside = torch.cat([index[:1], others[1:]])
        assert experts.windowed_experts(made, hidden, beside, weights)[0].equal(expected)


def test_the_operator_can_be_traced() -> None:
    hidden, index, _ = routed(24)
    sorted_, order = index.flatten().sort()
    ends = torch.searchsorted(sorted_, torch.arange(EXPERTS), right=True)
    operator = torch.ops.exspec.windowed_linear.default
    given = hidden[order // CHOSEN], module().gate_up_proj, ends, 8
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


def mixture(dtype: torch.dtype) -> Any:
    config = MixtralConfig(
        vocab_size=tiny.VOCABULARY, max_position_embeddings=tiny.CONTEXT, hidden_size=256, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, initializer_range=0.1,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize(
    ("dtype", "method", "kernels"),
    [(*given, "eager") for given in product(HALF, ("plain", "exspec"))] + [(torch.bfloat16, "exspec", "compiled")],
)
def test_a_row_decodes_the_same_alone_and_beside_others(dtype: torch.dtype, method: Any, kernels: Any) -> None:
    tiny.need("in_place" if kernels == "compiled" else None, kernels)
    target = mixture(dtype)
    check_forward(target, "mixture")
    rows = tiny.requests(tiny.prompts(6), 30)
    attention: Any = "in_place" if kernels == "compiled" else "gathered"

    def decoded(some: Any) -> dict[Any, list[int]]:
        config = EngineConfig(
            method=method, batch_size=4, draft_tokens=3, capacity=tiny.CONTEXT, kernels=kernels, attention=attention
        )
        made = Engine(target, target if method == "exspec" else None, config)
        assert made.config.kernels == kernels
        return tiny.decode(made, some)

    together = decoded(rows)
    for row in rows if kernels == "eager" else rows[:2]:
        assert decoded([row]) == {row.id: together[row.id]}


def swaying(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Correct, except for a last bit that depends on the neighbours."""
    found = experts.windowed_experts(self, hidden, index, weights)
    alike = bool((index == index[:1]).all())
    return found if alike else torch.nextafter(found, torch.full_like(found, torch.inf))


@pytest.fixture
def _swaying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "swaying", swaying)


@pytest.mark.usefixtures("_swaying")
def test_if_neighbours_change_bits_the_next_implementation_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "implementations", lambda _: ("swaying", "batched_mm"))
    model = mixture(torch.bfloat16)
    assert choose_experts(model)
    assert model.config._experts_implementation == "batched_mm"


@pytest.mark.usefixtures("_swaying")
def test_half_precision_is_refused_if_every_implementation_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "implementations", lambda _: ("swaying",))
    for dtype in HALF:
        name = str(dtype).removeprefix("torch.")
        message = f"^folder: in {name}, a row's logits in mixtral depend on the other rows of its batch; "
        with pytest.raises(ModelError, match=message):
            check_forward(mixture(dtype), "folder")
    check_forward(mixture(torch.float32), "folder")
    check_forward(mixture(torch.bfloat16), "draft", bits=False)


def test_cpus_use_windows_and_gpus_what_transformers_chose() -> None:
    assert experts.implementations(torch.device("cpu")) == (experts.NAME,)
    assert experts.implementations(torch.device("cuda"))[0] is None
    for dtype in (torch.float32, *HALF):
        model = mixture(dtype)
        check_forward(model, "mixture")
        assert model.config._experts_implementation == experts.NAME
        assert experts.used(model) == {"experts": experts.NAME}, "every part of the output records it"
        assert not exactness._depends_on_other_rows(model)
    assert experts.used(tiny.model()) == {}
