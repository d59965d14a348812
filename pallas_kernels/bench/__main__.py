"""python -m pallas_kernels.bench cache | plot"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cache = commands.add_parser("cache", help="time the cache update and the gather")
    cache.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    cache.add_argument("--only", default="", help="run the cases whose name matches this regular expression")
    cache.add_argument("--no-xla", action="store_true", help="leave XLA's times out")
    cache.add_argument("--runs", type=int, default=8, help="timed runs per program")
    plot = commands.add_parser("plot", help="draw the picture of a file of JSON lines")
    plot.add_argument("lines", type=Path)
    plot.add_argument("--out", type=Path, default=Path("out/cache_update.png"))
    arguments = parser.parse_args()
    if arguments.command == "cache":
        # XLA says in its dump which launches it captured. Set before JAX is imported.
        dump = tempfile.mkdtemp(prefix="xla_dump_")
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_module_re=.*decode_loop.*"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

        from pallas_kernels.bench.cache import main as run

        run(arguments.out, arguments.only, xla=not arguments.no_xla, runs=arguments.runs, dump=Path(dump))
    else:
        from pallas_kernels.bench.plot import main as draw

        draw(arguments.lines, arguments.out)


if __name__ == "__main__":
    main()
