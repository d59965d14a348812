"""Recorded outputs of one tiny attention layer per kind.

DeepSeek's published inference code and transformers agree on them to 6e-7. ``tests/data/README.md`` describes each
array.
"""

import dataclasses
import functools
import json

import ml_dtypes
import numpy as np

import dsv4jax as d4
from tests.support.paths import DATA

# Share of rounded values that may differ from the recorded ones. With fp32 sums in another order, about one value in
# 10^5 is rounded differently.
MOVED = 1e-3


@dataclasses.dataclass(frozen=True)
class Recording:
    kind: d4.AttentionType
    cfg: d4.DSV4Config
    params: d4.AttentionParams
    arrays: dict[str, np.ndarray]

    @property
    def x(self) -> np.ndarray:
        """The inputs, f32 [T, hidden], of positions 0 .. T - 1 of one request."""
        return self.arrays["x"]

    def tensors(self, naming: str) -> dict[str, np.ndarray]:
        """Return the weights under a naming, "hf" or "deepseek"."""
        prefix = f"{naming}/"
        return {name.removeprefix(prefix): value for name, value in self.arrays.items() if name.startswith(prefix)}

    def rounded(self, name: str) -> np.ndarray:
        """Return rows of the rounded run. Rope dims, recorded in fp32, are in bfloat16 as the format stores them."""
        rows = self.arrays[name].copy()
        rope = slice(-self.cfg.rope_dim, None)
        rows[..., rope] = rows[..., rope].astype(ml_dtypes.bfloat16).astype(np.float32)
        return rows


def moved_values(got: np.ndarray, want: np.ndarray) -> int:
    """Return how many rounded values differ."""
    assert got.shape == want.shape
    return int(np.sum(got != want))


@functools.cache
def load(kind: str) -> Recording:
    """Return the recording of "swa", "csa" or "hca"."""
    with np.load(DATA / f"{kind}.npz") as archive:
        arrays = dict(archive)
    cfg = d4.DSV4Config.from_hf(json.loads(bytes(arrays["hf_config"])))
    recording = Recording(d4.AttentionType(kind), cfg, None, arrays)  # type: ignore[arg-type]
    params = d4.load_attention_params(recording.tensors("hf"), cfg, 0)
    return dataclasses.replace(recording, params=params)
