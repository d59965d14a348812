"""Prints each fault of each kernel, and how the simulator finds it: python -m tests.mutants [PATTERN]"""

from __future__ import annotations

import re
import sys

from tests.mutants.kernels import HARMLESS, KERNELS, NEVER_MADE, faults_of, found

pattern, missed, count = sys.argv[1] if len(sys.argv) > 1 else "", 0, 0
for kernel in KERNELS:
    for fault in faults_of(kernel) if re.search(pattern, kernel) else []:
        if (why := HARMLESS.get((kernel, fault.machine))) is not None:
            print(f"{kernel} | {fault} | no fault: {why}")
            continue
        if (how := found(kernel, fault)) == NEVER_MADE:
            continue
        missed, count = missed + (how is None), count + 1
        print(f"{kernel} | {fault} | {'MISSED' if how is None else f'found: {how}'}", flush=True)
print(f"{count} faults, {missed} missed")
sys.exit(missed > 0)
