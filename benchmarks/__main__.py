"""All benchmarks in one command.

python -m benchmarks                              everything, on the CPU
python -m benchmarks --device cuda                what matters on a GPU, in one JSON: gradlineage-cuda.json
python -m benchmarks trace_cost memory            some of them
python -m benchmarks --readme                     everything, and the results section of benchmarks/README.md written anew
python -m benchmarks --readme --from out.json     the same from a run that was kept
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import torch

from benchmarks import harness
from benchmarks.harness import Options, Report

#: name -> (rounds, whether a GPU makes a difference)
ALL = {
    "trace_cost": (15, True),
    "walk_scaling": (15, False),
    "memory": (3, True),
    "kernels": (1, True),
    "without_computing": (1, False),
    "large": (3, True),
    "views": (5, False),
    "peers": (5, False),
}
README = pathlib.Path(__file__).with_name("README.md")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__, 0)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--readme", action="store_true", help="write the results into benchmarks/README.md")
    parser.add_argument("--from", dest="kept", metavar="FILE", help="take the results from this JSON instead of measuring")
    given = parser.parse_args(argv)
    unknown = [name for name in given.names if name not in ALL]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(ALL)}")
    cuda = given.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    if given.kept:
        reports = harness.loaded(given.kept)
    else:
        names = given.names or [name for name, (_, gpu) in ALL.items() if gpu or not cuda]
        print(", ".join(f"{key} {value}" for key, value in harness.machine(given.device).items()), flush=True)
        reports = [_run(name, given.device, given.rounds or ALL[name][0], given.quick) for name in names]
    target = given.json or ("gradlineage-cuda.json" if cuda and not given.kept else None)
    harness.finish(reports, target, given.compare, given.plot)
    if target:
        print(f"\nwritten: {target}")
    if given.readme:
        readme(reports)
    return 0


def _run(name: str, device: str, rounds: int, quick: bool) -> Report:
    print(f"\n== {name}", flush=True)
    options = Options(device, min(rounds, 2) if quick else rounds, quick, ())
    return harness.report(name, options, lambda words: print("\n" + words, end="", flush=True))


def readme(reports: Sequence[Report], path: pathlib.Path = README) -> None:
    """Write the results between the two marks; benchmarks that were not run now keep what stands there."""
    words = path.read_text(encoding="utf-8")
    head, _, rest = words.partition(BEGIN)
    old, _, tail = rest.partition(END)
    sections = {part.partition("\n")[0].strip(): part.rstrip() for part in old.split("### ")[1:]}
    sections |= {done.name: harness.markdown(done).removeprefix("### ").rstrip() for done in reports}
    ordered = [sections[name] for name in ALL if name in sections]
    path.write_text(f"{head}{BEGIN}\n\n" + "".join(f"### {part}\n\n" for part in ordered) + f"{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
