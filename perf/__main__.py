"""Measure on a GPU, or render what was measured.

    python -m perf CASE [--quick] [--out perf/results/CASE.jsonl]
    python -m perf tables

A case checks results first and prints one JSON line for each row, or appends them to a file.
`tables` writes the README's tables and the plots in docs/ from the rows; it needs no GPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path

import torch

from perf.revision import git_revision
from perf.rows import RowWriter, common_fields

CASES = ("vsa", "video", "msa", "topk", "csr", "k2")


def main(argv: list[str]) -> None:
    """Run one case.

    Raises
    ------
    SystemExit
        Wrong arguments, no GPU, or a result that is not right.
    """
    arguments = make_parser().parse_args(argv)
    if arguments.case == "tables":
        import_module("perf.tables").main()
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"python -m perf {arguments.case} needs a CUDA device; none is present")
    if arguments.samples is None:
        arguments.samples = 5 if arguments.quick else 20
    torch.manual_seed(arguments.seed)
    command = f"python -m perf {shlex.join(shown(argv))}"
    common = common_fields(command, arguments.revision, arguments.seed)
    with RowWriter(arguments.out, common) as writer, torch.no_grad():
        import_module(f"perf.{arguments.case}").run(arguments, writer)


def shown(argv: list[str]) -> list[str]:
    """Leave out where rows go: that is a place of one machine."""
    kept = [x for x in argv if not x.startswith("--out=")]
    while "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept


def make_parser() -> argparse.ArgumentParser:
    """Options of all cases, and of each."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, help="append the rows to this file")
    shared.add_argument("--quick", action="store_true", help="few shapes, few samples")
    shared.add_argument("--only", default="", help="parts of names, with commas between")
    shared.add_argument("--samples", type=int, help="rounds of timing; 20, or 5 (quick)")
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--revision", default=git_revision(), help="the commit, outside a checkout")
    parser = argparse.ArgumentParser(
        prog="python -m perf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    for name in CASES:
        module = import_module(f"perf.{name}")
        text = module.__doc__ or ""
        module.add_arguments(
            commands.add_parser(
                name,
                parents=[shared],
                help=text.splitlines()[0],
                description=text,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    commands.add_parser("tables", help="Render the README's tables and the plots from the rows.")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
