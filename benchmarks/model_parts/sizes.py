"""The model that a benchmark is of, and the arguments that choose it."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from dsv4jax.model import ModelConfig


def parser_of(program: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all have, for a program with this docstring."""
    parser = argparse.ArgumentParser(description=program, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=43, help="the first ones of V4-Flash")
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    return parser


def model_of(options: argparse.Namespace) -> ModelConfig:
    """Return the sizes of the model that parsed arguments choose."""
    flash = ModelConfig.flash()
    whole = ModelConfig.tiny() if options.tiny else flash
    return first_layers(with_layers(whole, flash.attention.compress_ratios, whole.num_hash_layers), options.layers)


def first_layers(cfg: ModelConfig, count: int) -> ModelConfig:
    """Return the sizes of a model of the first layers of another one."""
    ratios = cfg.attention.compress_ratios[:count]
    return with_layers(cfg, ratios, min(cfg.num_hash_layers, len(ratios)))


def with_layers(cfg: ModelConfig, ratios: tuple[int, ...], num_hash_layers: int) -> ModelConfig:
    """Return the same sizes with layers of these ratios, of which the first ones pick experts by the token's id."""
    attention = dataclasses.replace(cfg.attention, compress_ratios=ratios)
    return dataclasses.replace(cfg, attention=attention, num_hash_layers=num_hash_layers)
