"""Gradients of a recorded model by transformers and PyTorch, as an oracle that is independent of this project.

python -m tests.support.transformers_model    # records them again; needs torch and transformers
"""

# pyright: reportMissingImports=false
# torch and transformers are not among this project's dependencies; the tests that need them skip without.

import json

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4jax.model import ModelConfig
from tests.support.model_folders import MODELS, Tensors, recorded, renamed, sums_of
from tests.support.models import recorded as recorded_arrays

GRADIENTS = "gradients.json"  # beside the model


def gradients(name: str) -> tuple[float, Tensors]:
    """Return the mean cross entropy of the next tokens of the recorded text, and its gradients by name, in float32."""
    wrote = json.loads((MODELS / name / "hf_modules.json").read_text())["config"]
    config = DeepseekV4Config(**wrote)
    config._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).float().eval()
    weights = renamed(recorded(name)[0], "hf", ModelConfig.from_hf(wrote))
    model.load_state_dict({key: torch.tensor(np.asarray(value)) for key, value in weights.items()}, strict=False)
    missing = {key for key, _ in model.named_parameters()} - set(weights)
    assert not missing, missing
    ids = torch.tensor(recorded_arrays(name)["ids"][None], dtype=torch.long)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    loss.backward()
    found = {
        key: np.zeros(tuple(value.shape), np.float32) if value.grad is None else value.grad.numpy()
        for key, value in model.named_parameters()
    }
    return float(loss.detach()), found


def main() -> None:
    loss, found = gradients("a")
    lines = [f"{json.dumps(name)}: {json.dumps(sums_of(grad))}" for name, grad in found.items()]
    text = f'{{"loss": {loss!r},\n"tensors": {{\n' + ",\n".join(lines) + "}}\n"
    (MODELS / "a" / GRADIENTS).write_text(text)
    print(f"{loss=}, {len(found)} tensors, {len(text):,} bytes")


if __name__ == "__main__":
    main()
