"""Gradients of the whole recorded model are those of transformers and PyTorch, in float32."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.model import ModelParams, combine, forward_sequences, partition, save_model
from tests.model.test_partition import cross_entropy
from tests.support.model_folders import MODELS, Tensors, read_folder, renamed, sums_of
from tests.support.models import model_a, recorded

# Of a tensor's norm. Both in f32, through five layers, with sums in other orders: 1e-5 was seen at most.
SAME = 1e-4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Tensors]:
    """The mean cross entropy of the recorded text, and its gradients by the names of transformers' modules."""
    params = dataclasses.replace(model_a(), drafts=None)
    part, rest = partition(params)
    ids = jnp.asarray(recorded("a")["ids"], jnp.int32)[None]

    @jax.jit
    def graded(part: ModelParams, rest: ModelParams, ids: jax.Array) -> tuple[jax.Array, ModelParams]:
        def loss(part: ModelParams) -> jax.Array:
            return cross_entropy(forward_sequences(combine(part, rest), ids)[0], ids[0])

        return jax.value_and_grad(loss)(part)

    value, grads = graded(part, rest, ids)
    folder = tmp_path_factory.mktemp("gradients") / "a"
    save_model(combine(grads, rest), folder)
    return float(value), renamed(read_folder(folder)[0], "hf", params.cfg)


@pytest.mark.slow
def test_they_are_those_that_were_recorded(found):
    """By their norms and four sums each. Picks have no derivative, so that some are 0 in both."""
    wanted = json.loads((MODELS / "a" / "gradients.json").read_text())
    value, grads = found
    assert abs(value - wanted["loss"]) < 1e-5
    integers = {name for name, grad in grads.items() if grad.dtype == np.int64}
    buffers = {name for name in grads if name.endswith("e_score_correction_bias")}  # which transformers does not train
    assert set(grads) == set(wanted["tensors"]) | integers | buffers
    assert not any(grads[name].any() for name in buffers)
    nothing = {name for name, sums in wanted["tensors"].items() if not sums[0]}
    assert nothing == {name for name in wanted["tensors"] if ".indexer." in name}
    for name, sums in wanted["tensors"].items():
        np.testing.assert_allclose(sums_of(grads[name]), sums, rtol=0, atol=SAME * sums[0], err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # transformers warns of its own matters
def test_they_are_those_of_transformers_number_by_number(found):
    pytest.importorskip("torch", reason="the oracle of this test runs on PyTorch")
    pytest.importorskip("transformers.models.deepseek_v4", reason="this transformers has no DeepSeek-V4")
    from tests.support import transformers_model

    loss, wanted = transformers_model.gradients("a")
    value, grads = found
    assert abs(value - loss) < 1e-5
    for name, grad in wanted.items():
        assert np.linalg.norm(grads[name] - grad) <= SAME * np.linalg.norm(grad), name
