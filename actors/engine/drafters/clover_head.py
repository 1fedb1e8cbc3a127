"""The head of Clover (arXiv:2405.00263; its gate is Clover-2's, arXiv:2408.00264), for a chain of a few tokens.

H is the output of the target's last layer. e_i is the normalised row of the target's output head for the token before
the i-th drafted token. Both are [R, Q, D].

    h_0 = norm(layer(norm(H)))
    h_i = h_{i-1} + gate * V e_i         gate: by attention head, the cosine of q = Q h_{i-1} and k = K e_i
    logits of token i = the target's head of h_i + silu(MLP_i h_i)

The cosine replaces attention, whose weight would always be 1 for a single token.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, rms_norm, silu
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from exspec.actors.engine.drafters.head import HeadModel, checked

NAME = "clover"
EPSILON = 1e-6  # of the norm; far below the mean square of a row of the head


class CloverConfig(LlamaConfig):
    """heads: the most tokens of a draft. The other settings are those of the Llama layer."""

    model_type = NAME
    head_for = NAME  # the drafter that uses it

    def __init__(self, heads: int = 3, **llama: Any) -> None:
        super().__init__(**llama | {"num_hidden_layers": 1, "tie_word_embeddings": False})
        self.heads = heads

    @property
    def target_hidden_size(self) -> int:
        return int(self.hidden_size)


def read_config(values: dict[str, Any]) -> CloverConfig:
    """The config of a head from the values of its config.json. Raises ValueError naming what is wrong."""
    heads = values.get("heads")
    if type(heads) is not int or heads < 1:
        raise ValueError(f"config.json: heads is {heads!r}; expected the number of tokens that the head can draft")
    return checked(CloverConfig, CloverHead, {key: value for key, value in values.items() if key != "model_type"})


class CloverHead(HeadModel):
    """A causal language model whose forward also takes features [R, Q, D] and returns h_0 [R, Q, D] in place of logits.
    The target's output head is not part of the model."""

    config: CloverConfig
    config_class = CloverConfig

    def __init__(self, config: CloverConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.input_norm, self.norm = (LlamaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.mlps = nn.ModuleList([nn.Linear(size, size) for _ in range(config.heads)])
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """features: the output of the target's last layer."""
        hidden = self.layers[0](
            self.input_norm(features),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=self.rotary_emb(features, position_ids),
        )
        return CausalLMOutput(logits=self.norm(hidden[:, -logits_to_keep:]))

    def step(self, number: int, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """h_i and the input of the target's head, from h_{i-1} and the row of the head for token i - 1: [R, Q, D] each.
        number: i - 1."""
        token = rms_norm(embedding.float(), embedding.shape[-1:], eps=EPSILON).to(embedding.dtype)
        query, key, value = (
            x.unflatten(-1, (self.config.num_attention_heads, -1))
            for x in (self.q_proj(hidden), self.k_proj(token), self.v_proj(token))
        )
        hidden = hidden + (cosine_similarity(query, key, dim=-1)[..., None] * value).flatten(-2)
        return hidden, hidden + silu(self.mlps[number](hidden))


AutoConfig.register(NAME, CloverConfig)
AutoModelForCausalLM.register(CloverConfig, CloverHead)
