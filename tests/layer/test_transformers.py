"""The layer equals transformers' DeepseekV4Attention on fresh random weights."""

import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer
from tests.support.driver import even_split, feed

pytest.importorskip("torch", reason="the oracle of these tests runs on PyTorch")
pytest.importorskip("transformers.models.deepseek_v4", reason="this transformers has no DeepSeek-V4")

# transformers warns about its own optional parts on import; that is no business of these tests.
pytestmark = pytest.mark.filterwarnings("default")
LENGTH = 323  # past two HCA blocks, with a CSA block left unfinished
TOLERANCE = 2e-5  # fp32 on both sides; sums run in another order


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("sizes", ["tiny", "real head", "odd"])
def test_layer_equals_transformers_attention(kind, sizes):
    from tests.support import transformers_layer

    hf_config = transformers_layer.config_of(**transformers_layer.SIZES[sizes])
    weights, x, want = transformers_layer.run(kind, hf_config, LENGTH, seed=len(kind + sizes))
    cfg = d4.DSV4Config.from_hf(
        hf_config | {"layer_types": [transformers_layer.LAYER_TYPES[kind]], "num_hidden_layers": 1}
    )
    params = d4.load_attention_params(weights, cfg, 0)
    plan = d4.plan_cache(cfg, max_requests=2, max_context=LENGTH, kv_format="f32", indexer_format="f32")
    cache, slots, _ = d4.admit(d4.init_cache(plan), 2)
    outputs, _ = feed({0: params}, [x, x[:150]], cache, slots, [even_split(LENGTH, 64), even_split(150, 50)], width=64)

    decided = np.ones(LENGTH, bool)
    if kind == "csa":
        # Where the last pick and the first entry left out score alike, rounding decides and either is right.
        scores = np.sort(np.asarray(reference_layer(params, jnp.asarray(x), cfg, 0).scores), axis=1)[:, ::-1]
        last, next_best = scores[:, cfg.indexer_top_k - 1], scores[:, cfg.indexer_top_k]
        decided = last > next_best + 1e-5  # the score of no entry is -inf
        decided |= np.isneginf(next_best)
        assert decided.mean() > 0.98
    for got in outputs[0]:
        np.testing.assert_allclose(
            got[decided[: len(got)]], want[: len(got)][decided[: len(got)]], rtol=0, atol=TOLERANCE
        )
