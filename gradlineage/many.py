"""`trace_many`: one model, many inputs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch import nn

from gradlineage.errors import LineageError, a_kind
from gradlineage.lineage import Lineage
from gradlineage.notes import callable_modules
from gradlineage.runs import Runs
from gradlineage.tracing import model_of, preserved_random_state, trace_once

__all__ = ["trace_calls", "trace_many", "with_progress"]

_T = TypeVar("_T")

_AT_ONCE = 64  # passes that are merged in one go


def trace_many(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    prepare: Callable[[Any], Any] | None = None,
    max_paths: int = 100,
    start: int = 0,
    step: int = 1,
    progress: bool | None = None,
) -> Runs:
    """Trace a model once per input and keep what differs: which paths were taken, how often, what decided.

    Args:
        model: as for `gradlineage.trace`; each pass leaves it as it was.
        batches: any iterable, a ``DataLoader`` too. A tensor is ``model(x)``, a tuple or list ``model(*b)``, a mapping ``model(**b)``.
        prepare: turns what the iterable gives into one of these, such as ``lambda batch: batch[0].cuda()``.
        max_paths: so many lineages are kept, those of the paths seen first; counts go on beyond.
        start, step: the first input's number and the distance to the next, for parts of a data set that are traced elsewhere.
        progress: a bar on standard error; by default if that is a terminal.

    Raises:
        LineageError: ``batches`` cannot be iterated over, or a batch is none of these. What the model raises comes through, with the number
            of the input.

    Example:
        >>> import torch, gradlineage
        >>> class Gate(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.warm, self.cold = torch.nn.ReLU(), torch.nn.Tanh()
        ...     def forward(self, x):
        ...         return self.warm(x) if x.sum() > 0 else self.cold(x)
        >>> runs = gradlineage.trace_many(Gate(), [torch.ones(2), -torch.ones(2), torch.ones(3)])
        >>> [(path.count, path.examples) for path in runs.paths]
        [(2, (0, 2)), (1, (1,))]
    """
    model_of(model, "trace_many")
    for name, value, least in (("max_paths", max_paths, 0), ("start", start, 0), ("step", step, 1)):
        if not isinstance(value, int) or value < least:
            raise LineageError(f"trace_many({name}={value!r}): expected a whole number from {least} on")
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes | Mapping | torch.Tensor):
        raise LineageError(f"trace_many(): batches is {a_kind(batches)}, expected an iterable of inputs: a list of tensors, a DataLoader")
    total = len(batches) if isinstance(batches, Sized) else None
    bound = (
        _arguments(batch if prepare is None else prepare(batch), number)
        for number, batch in enumerate(with_progress(batches, total, progress))
    )
    return trace_calls(model, bound, max_paths=max_paths, start=start, step=step)


def trace_calls(
    model: nn.Module, calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]], *, max_paths: int = 100, start: int = 0, step: int = 1
) -> Runs:
    """`trace_many` for inputs that are positional and keyword arguments each."""
    models = {"": model}
    modules = list(callable_modules(model))
    runs = Runs(type(model).__name__, modules, {}, {}, {}, (), max_paths)
    pending: list[Runs] = []
    number = start
    with preserved_random_state(models):  # as a whole: each pass draws what follows
        try:
            for args, kwargs in calls:
                lineage = _placeless(trace_once(models, args, kwargs))
                pending.append(Runs.of(lineage, number, modules, max_paths))
                number += step
                if len(pending) == _AT_ONCE:
                    runs, pending = runs.merge(*pending), []
        except LineageError:
            raise  # what is wrong with the input, in its own words
        except Exception as error:
            error.add_note(f"while tracing input {number} of many")
            raise
        finally:
            if isinstance(calls, Generator):
                calls.close()  # the bar too, while the exception is still looked at
    return runs.merge(*pending)


def _placeless(lineage: Lineage) -> Lineage:
    """Without the line that called the model: parts that were traced by different scripts are to be equal."""
    graph = lineage._graph
    return Lineage(graph._replace(calls=tuple(c._replace(where="") if c.parent < 0 else c for c in graph.calls)))


def _arguments(batch: Any, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise LineageError(
        f"trace_many(): item {number} is {a_kind(batch)}; expected a tensor, a tuple or list of arguments or a mapping of keywords; "
        "turn it into one with prepare="
    )


@contextlib.contextmanager
def _bar(total: int | None) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tracing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tracing", total=total)
        yield lambda: bar.advance(task)


def with_progress(batches: Iterable[_T], total: int | None, shown: bool | None = None) -> Iterator[_T]:
    """The same, with a bar on standard error; by default where that is a terminal."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield from batches
        return
    with _bar(total) as advance:
        for batch in batches:
            yield batch
            advance()
