"""One DeepseekV4Attention of transformers with random weights, as an oracle that is independent of this project."""

# pyright: reportMissingImports=false
# torch and transformers are not among this project's dependencies; the tests that need them skip without.

import numpy as np
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

LAYER_TYPES = {
    "swa": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}


def run(kind: str, hf_config: dict, length: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return (weights under transformers' names, x [length, hidden], output [length, hidden]), all float32 on CPU."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(**(hf_config | {"layer_types": [LAYER_TYPES[kind]], "num_hidden_layers": 1}))
    config._attn_implementation = "eager"
    layer = DeepseekV4Attention(config, layer_idx=0).float().eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (0.0 if "sinks" in name else 1.0))
            else:
                parameter.copy_(noise * (0.5 if "position_bias" in name else parameter.shape[-1] ** -0.5))
        x = torch.randn(1, length, config.hidden_size)
        positions = torch.arange(length)[None]
        rotary = DeepseekV4RotaryEmbedding(config)
        embeddings = {name: rotary(x, positions, layer_type=name) for name in ("main", "compress")}
        age = positions[0][:, None] - positions[0][None]
        visible = (age >= 0) & (age < config.sliding_window)
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
        out, _ = layer(x, embeddings, positions, mask)
    weights = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}
    return weights, x[0].numpy(), out[0].numpy()


def config_of(**sizes) -> dict:
    """Return the keyword arguments of DeepseekV4Config for a layer of these sizes; see ``SIZES``."""
    rope_dim = sizes.pop("rope_dim")
    factor = rope_dim / sizes["head_dim"]
    yarn = dict(
        type="yarn",
        rope_type="yarn",
        factor=16,
        beta_fast=32,
        beta_slow=1,
        attention_factor=1.0,
        original_max_position_embeddings=sizes.pop("yarn_original"),
        rope_theta=160000.0,
        partial_rotary_factor=factor,
    )
    main = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=factor)
    return sizes | dict(
        vocab_size=97,
        num_key_value_heads=1,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        partial_rotary_factor=factor,
        qk_rope_head_dim=rope_dim,
        max_position_embeddings=4096,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        rope_parameters={"main": main, "compress": yarn},
    )


SIZES = {
    "tiny": dict(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=136,
        rope_dim=8,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=16,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=12,
        yarn_original=64,
    ),
    "real head": dict(
        hidden_size=256,
        num_attention_heads=8,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=64,
        o_groups=4,
        o_lora_rank=32,
        sliding_window=128,
        index_n_heads=8,
        index_head_dim=128,
        index_topk=32,
        yarn_original=65536,
    ),
    "odd": dict(
        hidden_size=96,
        num_attention_heads=6,
        head_dim=80,
        rope_dim=16,
        q_lora_rank=40,
        o_groups=3,
        o_lora_rank=24,
        sliding_window=37,
        index_n_heads=12,
        index_head_dim=64,
        index_topk=20,
        yarn_original=256,
    ),
}
