"""A whole DeepSeek-V4 model around the cache: from a checkpoint's folder to tokens.

config             the sizes of a model
params             its weights, as frozen pytrees
ops                the ops that have several implementations, and what they hand to one another
plain              these ops in plain JAX: experts, router, hyper-connections, head
kernels            their implementations that call ``pallas_kernels``
inside             a pass from within: its layers, what can be captured of it, and its choices as values
forward_pass       the forward pass over the cache, on drafts, and over whole sequences
drafts             guesses at the next tokens, by a block for multi-token prediction
dspark             the same by DSpark, whose block guesses several at once
caches             the model's cache and that of its drafts
generation         prompts in, new tokens out, in compiled loops
checkpoint         a model's folder: loading, saving, its tokenizer
partition          the weights that can be trained, and the rest
initial            random models
deltas             low-rank deltas on its weights
memory             the bytes of a model's weights
"""

import dsv4jax.model.kernels.experts as _expert_kernels  # noqa: F401  imported to register it
import dsv4jax.model.kernels.head as _head_kernels  # noqa: F401  the same
import dsv4jax.model.kernels.hyper_connections as _hyper_connections_kernels  # noqa: F401  the same
import dsv4jax.model.kernels.router as _router_kernels  # noqa: F401  the same
import dsv4jax.model.plain.experts as _experts  # noqa: F401  the same
import dsv4jax.model.plain.head as _head  # noqa: F401  the same
import dsv4jax.model.plain.hyper_connections as _hyper_connections  # noqa: F401  the same
import dsv4jax.model.plain.invariant as _invariant  # noqa: F401  the same
import dsv4jax.model.plain.router as _router  # noqa: F401  the same
from dsv4jax.layer.stages.entries import CompletedEntries
from dsv4jax.layer.stages.weights import AttentionWeights
from dsv4jax.model.caches import Caches, Snapshots, init_caches, restore_caches, save_caches
from dsv4jax.model.checkpoint.adapter import load_deltas, save_deltas
from dsv4jax.model.checkpoint.load import load_model
from dsv4jax.model.checkpoint.save import save_model
from dsv4jax.model.checkpoint.text import Text, chat_text
from dsv4jax.model.config import DSparkConfig, ModelConfig
from dsv4jax.model.deltas import merge_deltas, with_deltas, without_deltas
from dsv4jax.model.drafts import draft_forward
from dsv4jax.model.forward_pass import (
    Inspection,
    forward,
    forward_sequences,
    forward_with_indexer_loss,
    inspect_forward,
    stage_forward,
)
from dsv4jax.model.generation.drafting import JudgedDraft
from dsv4jax.model.generation.generator import Generated, Generator, generate
from dsv4jax.model.generation.sampling import Sampling
from dsv4jax.model.initial import random_model
from dsv4jax.model.inside.choices import Choices
from dsv4jax.model.inside.lens import logit_lens
from dsv4jax.model.inside.weights import attention_weights
from dsv4jax.model.memory import MemoryPlan, StepMemory, TrainingStep, plan_memory
from dsv4jax.model.ops import Mixing, Picks
from dsv4jax.model.params import ModelParams, StoredExperts
from dsv4jax.model.partition import combine, partition

__all__ = [
    "AttentionWeights",
    "Caches",
    "Choices",
    "CompletedEntries",
    "DSparkConfig",
    "Generated",
    "Generator",
    "Inspection",
    "JudgedDraft",
    "MemoryPlan",
    "Mixing",
    "ModelConfig",
    "ModelParams",
    "Picks",
    "Sampling",
    "Snapshots",
    "StepMemory",
    "StoredExperts",
    "Text",
    "TrainingStep",
    "attention_weights",
    "chat_text",
    "combine",
    "draft_forward",
    "forward",
    "forward_sequences",
    "forward_with_indexer_loss",
    "generate",
    "init_caches",
    "inspect_forward",
    "load_deltas",
    "load_model",
    "logit_lens",
    "merge_deltas",
    "partition",
    "plan_memory",
    "random_model",
    "restore_caches",
    "save_caches",
    "save_deltas",
    "save_model",
    "stage_forward",
    "with_deltas",
    "without_deltas",
]
