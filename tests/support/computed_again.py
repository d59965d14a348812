"""What XLA computes again where memory is short, from a donated cache: python -m tests.support.computed_again full

Compiles a decode step and a draft of two layers of a model of V4-Flash's size, whose weights alone are more than the
GPU's memory. Prints one JSON line: how many fusions XLA has repeated, and the donated arrays that they read, which may
hold by then what is returned. Needs the extra ``cross``.
"""

import argparse
import json
import re

from tests.support.compile_for_gpu import TARGETS, compile_for, prepare_environment
from tests.support.model_launches import step_of

_AGAIN = re.compile(r"^\s*%?\S*remat\S* = .*? fusion\((.*?)\), kind", re.M)
_DONATED = re.compile(r"\bcache_\w+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    options = parser.parse_args()
    prepare_environment()
    report = {}
    for drafts in (0, 3):
        step, args = step_of((4, 128), requests=1, drafts=drafts)
        found = _AGAIN.findall(compile_for(options.target, step, *args, donate_argnums=2).as_text() or "")
        read = {name for given in found for name in _DONATED.findall(given)}
        report[f"{drafts} drafts"] = {"again": len(found), "donated": sorted(read)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
