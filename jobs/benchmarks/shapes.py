"""Shapes of known models, by name."""

from typing import Any

QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
         "max_position_embeddings": 40960}  # fmt: skip
LLAMA = {"model_type": "llama", "vocab_size": 32000}
GLM4 = {"model_type": "glm4", "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        "max_position_embeddings": 32768, "partial_rotary_factor": 0.5}  # fmt: skip
SMALL = QWEN3 | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
                 "tie_word_embeddings": True}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": QWEN3 | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
                              "intermediate_size": 12288, "tie_word_embeddings": False},
    "Qwen/Qwen3-0.6B": SMALL,
    "Vicuna-7B": LLAMA | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                          "num_key_value_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 4096},
    "68M": LLAMA | {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 12,
                    "intermediate_size": 3072, "max_position_embeddings": 2048},
    "GLM-4-9B": GLM4 | {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
                        "intermediate_size": 13696, "tie_word_embeddings": False},
    "0.6B": SMALL | {"vocab_size": 151552, "max_position_embeddings": 32768},  # Qwen3-0.6B with the vocabulary of GLM-4
    "tiny": LLAMA | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "intermediate_size": 128, "max_position_embeddings": 512, "vocab_size": 128},
}  # fmt: skip


def pair_names(pair: str) -> tuple[str, str]:
    """The two shapes of TARGET:DRAFT. Raises ValueError naming one that is unknown."""
    target, _, draft = pair.partition(":")
    for name in (target, draft):
        if name not in SHAPES:
            raise ValueError(f"no shape {name!r}; expected TARGET:DRAFT of {', '.join(SHAPES)}")
    return target, draft
