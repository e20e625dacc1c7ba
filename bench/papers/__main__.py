"""Measure and draw the figures of the four papers.

    python -m bench.papers [NAME...] [--list] [--again] [--with-throttle]

Without names all figures are measured that are not yet. Bundles, traces and results lie in --work, so a run that was
stopped goes on. Pictures, numbers and pages go to --output. A figure of the natural example needs its folder
(`make example-smollm2`). Without the folder its published result stays.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# As the console script does, before torch is imported: threads that spin while they wait slow other processes down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from .figure import PAPERS
from .inputs import Inputs
from .making import make
from .models import ROOT
from .registry import FIGURES, NOT_MEASURED


def say(sentence: str) -> None:
    """Print a sentence for people."""
    print(sentence, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; by default all")
    parser.add_argument("--list", action="store_true", help="print the figures and stop")
    parser.add_argument("--again", action="store_true", help="measure also what has a result")
    parser.add_argument("--with-throttle", action="store_true", help="measure also with limited storage: Linux, root")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "papers", help="what is kept between runs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "papers", help="where pages and pictures go")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - {figure.name for figure in FIGURES})
    if unknown:
        parser.error(f"no figure is called {', '.join(unknown)}; `--list` prints all names")
    if options.list:
        for figure in FIGURES:
            print(f"{figure.name:28} {PAPERS[figure.paper]}, {figure.source}: {figure.title}")
        for each in NOT_MEASURED:
            print(f"{'not measured':28} {PAPERS[each.paper]}, {each.source}: {each.title}")
        return
    if options.with_throttle and os.geteuid() != 0:
        parser.error("`--with-throttle` limits reads by control groups, which needs root")
    inputs = Inputs(options.work, say, options.with_throttle)
    chosen = [figure for figure in FIGURES if not options.names or figure.name in options.names]
    make(chosen, inputs, options.output, options.again, say)


if __name__ == "__main__":
    main()
