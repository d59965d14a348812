"""python -m benchmarks.kernels cache | attention | indexer | topk | step | tune | plot | report; each has its -h"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    timed = {
        "cache": "the cache update and the gather",
        "attention": "decode attention",
        "indexer": "indexer scores",
        "topk": "top-k",
        "step": "a decode step of all layers",
        "tune": "attention, indexer and top-k by ways to share their work",
    }
    for command, what in timed.items():
        parser_of = commands.add_parser(command, help=f"time {what}")
        parser_of.add_argument("--out", type=Path, default=None, help="append JSON lines here")
        if command != "tune":
            parser_of.add_argument("--backend", default=None, choices=["triton"], help="time these kernels, too")
        if command == "step":
            continue
        parser_of.add_argument("--only", default="", help="run the cases whose name matches this regular expression")
        parser_of.add_argument("--runs", type=int, default=8, help="timed runs per program")
        if command != "tune":
            parser_of.add_argument("--no-xla", action="store_true", help="leave XLA's times out")
    plot = commands.add_parser("plot", help="draw the picture of a file of JSON lines")
    plot.add_argument("lines", type=Path)
    plot.add_argument("--out", type=Path, default=Path("out/times.svg"))
    commands.add_parser("report", help="write the tables and pictures of README.md and docs/")
    arguments = parser.parse_args()
    dump = Path(tempfile.mkdtemp(prefix="xla_dump_"))
    if arguments.command in ("cache", "step"):
        # XLA's dump shows which launches it captured. This must be set before JAX is imported.
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_module_re=.*decode_loop.*"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    if arguments.command == "cache":
        from benchmarks.kernels.update import main as run

        backends = ("pallas", *_more(arguments), *(() if arguments.no_xla else ("xla",)))
        run(arguments.out, arguments.only, backends, runs=arguments.runs, dump=dump)
    elif arguments.command == "step":
        from benchmarks.kernels.step import main as run_step

        run_step(arguments.out, dump, ("pallas", *_more(arguments)), tokens=16)
    elif arguments.command == "tune":
        from benchmarks.kernels.reads import tune

        tune(arguments.out, arguments.only, runs=arguments.runs)
    elif arguments.command in timed:
        from benchmarks.kernels.reads import main as run_reads

        backends = ("pallas", *_more(arguments), *(() if arguments.no_xla else ("xla",)))
        run_reads(arguments.command, arguments.out, arguments.only, backends, runs=arguments.runs)
    elif arguments.command == "plot":
        from benchmarks.kernels.chart import main as draw

        draw(arguments.lines, arguments.out)
    else:
        from benchmarks.kernels.report import main as write

        write()


def _more(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Backends that are timed beside the default ones."""
    backend = getattr(arguments, "backend", None)
    return () if backend is None else (backend,)


if __name__ == "__main__":
    main()
