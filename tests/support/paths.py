"""Where the checkout is, what tests read from it, and where they keep what they compiled."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
COMPILED = ROOT / ".jax_cache"
