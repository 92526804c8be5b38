"""Shapes of released models' transformer layers, matrix by matrix as in their checkpoints.

Each function names the source of its numbers: the `config.json` that is published with the weights. A shape
is that of the parameter, `(out_features, in_features)` for a linear layer.
"""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]


def _norms(**widths: int) -> Shapes:
    return {f"{name}.weight": (width,) for name, width in widths.items()}


def _gated_mlp(prefix: str, hidden: int, intermediate: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def _grouped_query_attention(hidden: int, heads: int, key_value_heads: int, head_dim: int) -> Shapes:
    return {
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (key_value_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (key_value_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
    }


def _experts(hidden: int, intermediate: int, count: int) -> Shapes:
    shapes: Shapes = {"mlp.gate.weight": (count, hidden)}
    for expert in range(count):
        shapes |= _gated_mlp(f"mlp.experts.{expert}", hidden, intermediate)
    return shapes


def llama3_8b_layer() -> Shapes:
    """Source: config.json of meta-llama/Meta-Llama-3-8B."""
    return {
        **_grouped_query_attention(hidden=4096, heads=32, key_value_heads=8, head_dim=128),
        **_gated_mlp("mlp", hidden=4096, intermediate=14336),
        **_norms(input_layernorm=4096, post_attention_layernorm=4096),
    }


def llama3_70b_layer() -> Shapes:
    """Source: config.json of meta-llama/Meta-Llama-3-70B."""
    return {
        **_grouped_query_attention(hidden=8192, heads=64, key_value_heads=8, head_dim=128),
        **_gated_mlp("mlp", hidden=8192, intermediate=28672),
        **_norms(input_layernorm=8192, post_attention_layernorm=8192),
    }


def qwen3_235b_layer() -> Shapes:
    """Source: config.json of Qwen/Qwen3-235B-A22B: dense attention, 128 experts."""
    return {
        **_grouped_query_attention(hidden=4096, heads=64, key_value_heads=4, head_dim=128),
        **_experts(hidden=4096, intermediate=1536, count=128),
        **_norms(input_layernorm=4096, post_attention_layernorm=4096),
        **_norms(**{"self_attn.q_norm": 128, "self_attn.k_norm": 128}),
    }


def _latent_attention() -> Shapes:
    hidden, heads = 7168, 128
    query_rank, key_value_rank = 1536, 512
    content_dim, rotary_dim, value_dim = 128, 64, 128
    return {
        "self_attn.q_a_proj.weight": (query_rank, hidden),
        "self_attn.q_b_proj.weight": (heads * (content_dim + rotary_dim), query_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (key_value_rank + rotary_dim, hidden),
        "self_attn.kv_b_proj.weight": (heads * (content_dim + value_dim), key_value_rank),
        "self_attn.o_proj.weight": (hidden, heads * value_dim),
        **_norms(**{"self_attn.q_a_layernorm": query_rank, "self_attn.kv_a_layernorm": key_value_rank}),
        **_norms(input_layernorm=hidden, post_attention_layernorm=hidden),
    }


def deepseek_v3_dense_layer() -> Shapes:
    """Source: config.json of deepseek-ai/DeepSeek-V3: latent attention, one MLP (layers 0 to 2)."""
    return {**_latent_attention(), **_gated_mlp("mlp", hidden=7168, intermediate=18432)}


def deepseek_v3_moe_layer() -> Shapes:
    """Source: as above: latent attention, 256 routed experts and a shared one (layers 3 to 60)."""
    return {
        **_latent_attention(),
        **_experts(hidden=7168, intermediate=2048, count=256),
        "mlp.gate.e_score_correction_bias": (256,),
        **_gated_mlp("mlp.shared_experts", hidden=7168, intermediate=2048),
    }


def deepseek_v3_units() -> list[Shapes]:
    """All of DeepSeek-V3 as it is wrapped: 61 layers, and a root with embedding, last norm and head."""
    root: Shapes = {
        "model.embed_tokens.weight": (129280, 7168),
        "model.norm.weight": (7168,),
        "lm_head.weight": (129280, 7168),
    }
    return [
        *(deepseek_v3_dense_layer() for _ in range(3)),
        *(deepseek_v3_moe_layer() for _ in range(58)),
        root,
    ]
