"""How long does each way to look at a lineage take?

On ResNet-50 and on a model of 2,000 layers; every time on a lineage that was just loaded, so that nothing was worked out before.

    python -m benchmarks.views [--rounds 5] [--json out.json] [--compare old.json]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import gradlineage
from benchmarks import harness
from benchmarks.harness import Figure, Options, Way
from benchmarks.memory import stack_of
from benchmarks.models import build, read

VIEWS: dict[str, Callable[[gradlineage.Lineage], object]] = {
    "read": read,
    "table": lambda lineage: lineage.to_table(),
    "table, depth 1": lambda lineage: lineage.collapse(depth=1).to_table(),
    "json": lambda lineage: lineage.to_json(),
    "dot": lambda lineage: lineage.to_dot(),
    "mermaid": lambda lineage: lineage.to_mermaid(),
    "svg": lambda lineage: lineage.to_svg(),
    "html": lambda lineage: lineage.to_html(),
    "lint": gradlineage.lint,
    "gradient": lambda lineage: lineage.gradient(),
}


def measure(options: Options) -> Iterator[Figure]:
    count = 40 if options.quick else 2_000
    for spec in (*(() if options.quick else ("resnet50@64",)), f"{count:,} layers"):
        if "layers" in spec:
            model, x = stack_of(count)
            lineage = gradlineage.trace(model, x)
        else:
            model, args = build(spec)
            lineage = gradlineage.trace(model, *args)
        saved = lineage.to_json()
        load = functools.partial(gradlineage.Lineage.from_json, saved)
        assert load() == lineage
        for name, view in VIEWS.items():
            try:
                times = harness.rounds({name: Way(view, load)}, 1 if options.quick else min(options.rounds, 5))[name]
            except Exception as error:
                yield Figure("milliseconds", spec, name, None, note=f"{type(error).__name__}: {str(error)[:80]}")
                continue
            yield Figure.of("milliseconds", spec, name, times, "ms")
        loads = harness.rounds({"load": load}, min(options.rounds, 5))["load"]
        yield Figure.of("milliseconds", spec, "from json", loads, "ms")
        yield Figure("milliseconds", spec, "size of json", len(saved) / 1e3, "kB")


def main(argv: list[str] | None = None) -> int:
    return harness.main("views", argv, count=5)


if __name__ == "__main__":
    raise SystemExit(main())
