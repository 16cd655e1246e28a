"""`trace` and `recording`: what is switched around a pass and put back after it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gradlineage.containers import tensors_in
from gradlineage.errors import TraceError
from gradlineage.freeze import freeze
from gradlineage.lineage import Lineage
from gradlineage.naming import short_path
from gradlineage.notes import is_inside, line_of
from gradlineage.private import CALL
from gradlineage.record import Recorder

__all__ = ["Recording", "model_of", "preserved_random_state", "recording", "trace", "trace_once"]


class _NeedsSaved(TraceError):
    """The forward asked for an activation that was dropped. `trace` runs it once more with them kept."""


def _pack(tensor: torch.Tensor) -> None:
    return None


class _Dropper:
    """Saved-tensor hooks that keep nothing: a trace needs the shape of autograd's graph, never its activations."""

    def __init__(self) -> None:
        self.asked = False

    def unpack(self, _: None) -> torch.Tensor:
        self.asked = True
        raise _NeedsSaved(
            "this forward differentiates something, but the saved activations were dropped; gradlineage.trace() runs such a forward twice, "
            "and recording(model) keeps them unless drop_saved=True"
        )

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(_pack, self.unpack)


class _Switches:
    """Process-wide switches, counted: the first recording sets them, the last one puts them back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.undo: list[Any] = []

    def set(self) -> None:
        with self.lock:
            self.count += 1
            if self.count > 1:
                return
            before = sys.getrecursionlimit()
            raised = before + before // 2  # a module that is watched takes four of Python's frames instead of three
            sys.setrecursionlimit(raised)
            self.undo.append(lambda: sys.setrecursionlimit(before) if sys.getrecursionlimit() == raised else None)
            mha = torch.backends.mha
            if mha.get_fastpath_enabled():  # the fused path of TransformerEncoder calls no modules
                mha.set_fastpath_enabled(False)
                self.undo.append(lambda: mha.set_fastpath_enabled(True))
            if hasattr(torch.compiler, "set_stance"):  # compiled parts run as written
                stance = torch.compiler.set_stance("force_eager")
                stance.__enter__()
                self.undo.append(lambda: stance.__exit__(None, None, None))

    def reset(self) -> None:
        with self.lock:
            self.count -= 1
            while self.count == 0 and self.undo:
                self.undo.pop()()


_switches = _Switches()


class Recording:
    """What `recording` gives: open while the ``with`` block runs, ready to be asked during and after it."""

    def __init__(
        self, models: Mapping[str, nn.Module], *, shadow: bool, drop_saved: bool, alias: bool, restore: bool, random: bool = True
    ) -> None:
        self._random = random  # whether restoring includes torch's random state
        self._recorder = Recorder(models, shadow=shadow, alias=alias, restore=restore)
        self._stack = contextlib.ExitStack()
        self._dropper = _Dropper() if drop_saved else None
        self._state = "new"
        self._notes: list[str] = []

    def __enter__(self) -> Recording:
        if self._state != "new":
            raise TraceError(f"this recording is {self._state}; a recording is opened once, make another with gradlineage.recording(model)")
        self._state = "open"
        with contextlib.ExitStack() as undo:
            _switches.set()
            undo.callback(_switches.reset)
            keeper = self._recorder.keeper
            if keeper is not None:
                undo.callback(keeper.restore)
                if self._random:
                    undo.enter_context(preserved_random_state(self._recorder.registry.models))
            undo.callback(self._recorder.stop)
            self._recorder.start()
            if self._dropper is not None:
                undo.enter_context(self._dropper.hooks())
            self._stack = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None) -> None:
        self._state = "closed"
        try:
            if error is not None:
                self._annotate(error)
        finally:
            self._stack.close()

    def _annotate(self, error: BaseException) -> None:
        """Say where in the model the user's own exception came from."""
        call = self._recorder.failing(error)
        if call is None:
            return
        names = ", ".join(type(m).__name__ for m in self._recorder.registry.models.values())
        label = (call.path or call.type) + (f"[{call.nth}]" if call.nth else "")
        line = _failing_line(error) or (
            f"{short_path(call.code.co_filename)}:{line_of(call.code, call.code_at)}" if call.code is not None else ""
        )
        spot = f" at {line}" if line else ""
        self._notes.append(f"The pass broke off in call {label}{spot}: {type(error).__name__}.")
        told = [f"while tracing {names}, in call {label}{spot}"]
        if _wants_values(error, self._recorder):
            told.append(
                f"the step{spot} needs the values of tensors, and here these have none (meta or fake tensors): trace with real inputs"
            )
        with contextlib.suppress(TypeError, AttributeError):  # an exception that takes no notes
            for note in told:
                error.add_note(note)

    def wanted_saved(self, error: Exception | None) -> bool:
        """Whether the pass asked for a saved tensor that was dropped, or could not run with saved tensors hooked."""
        asked = self._dropper is not None and self._dropper.asked
        return asked or (isinstance(error, RuntimeError) and "saved tensor" in str(error) and "hooks" in str(error))

    def lineage(self, *outputs: Any) -> Lineage:
        """The lineage of what was recorded so far.

        Args:
            outputs: tensors, or containers of tensors, to name as its outputs, such as a loss; without any, what the root calls returned.

        Raises:
            TraceError: an output without a tensor in it.
        """
        named: list[tuple[str, torch.Tensor]] | None = None
        if outputs:
            named = [item for i, output in enumerate(outputs) for item in tensors_in(output, f"[{i}]" if len(outputs) > 1 else "")]
            if not named:
                raise TraceError(
                    f"lineage() was given {type(outputs[0]).__name__}, in which there is no tensor; give the tensors to explain, or nothing"
                )
        return Lineage(freeze(self._recorder, named, self._notes))


def _failing_line(error: BaseException) -> str:
    """The innermost line outside torch and this package that an exception came through, where that lies within the pass."""
    found, inside = "", False
    trail = error.__traceback__
    while trail is not None:
        code = trail.tb_frame.f_code
        inside = inside or code is CALL
        if inside and not is_inside(code) and not code.co_filename.startswith("<frozen"):
            found = f"{short_path(code.co_filename)}:{trail.tb_lineno}"
        trail = trail.tb_next
    return found


_VALUELESS = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


def _wants_values(error: BaseException, recorder: Recorder) -> bool:
    """Whether a step failed because its tensors have no values."""
    if type(error).__name__ in _VALUELESS:
        return True
    meta = any(str(item[3]) == "meta" for call in recorder.calls for item in call.inputs)
    return meta and isinstance(error, RuntimeError) and "meta" in str(error).lower()


def recording(
    model: nn.Module | Mapping[str, nn.Module], *, shadow: bool = True, drop_saved: bool = False, restore: bool = False
) -> Recording:
    """Record everything that runs in a ``with`` block: training steps, ``generate`` loops, several models.

    Autograd's graph is kept, so the user's own ``loss.backward()`` works as ever. A module that hands its input through is told from that
    input by time alone here (see ``docs/limits.md``).

    Args:
        model: a module, or several by name: ``{"gen": g, "critic": c}``. Their paths begin with the name.
        shadow: False leaves out the function mode: what autograd drops is ``unknown`` then, and operations bear autograd's names (``~bmm``).
        drop_saved: keep no activations. For inference loops; a backward is not possible then.
        restore: put parameters, buffers and random state back at the end, as `trace` does.

    Raises:
        TraceError: something that is no module.

    Example:
        >>> import torch, gradlineage
        >>> net = torch.nn.Linear(3, 1)
        >>> with gradlineage.recording(net) as rec:
        ...     loss = net(torch.ones(2, 3)).square().mean()
        >>> [s.label for s in rec.lineage(loss).outputs[0].sources]
        ['Linear']
    """
    return Recording(model_of(model, "recording"), shadow=shadow, drop_saved=drop_saved, alias=False, restore=restore)


def trace(model: nn.Module, /, *args: Any, **kwargs: Any) -> Lineage:
    """Run ``model(*args, **kwargs)`` once and say what fed each layer.

    The pass runs on the device, in the grad mode and under the autocast state that the caller has. Parameters, buffers and torch's random
    state are put back, every hook is removed. No activation is kept; a forward that itself differentiates runs a second time with them kept.

    Returns:
        The `Lineage`; it holds no tensors.

    Raises:
        TraceError: ``model`` is no module. An exception from the forward comes through as it is, with a note that says in which call.

    Example:
        >>> import torch, gradlineage
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> [source.label for source in gradlineage.trace(net, torch.ones(2, 3))["1"].inputs[0].sources]
        ['0']
    """
    models = model_of(model, "trace")
    with preserved_random_state(models):
        return trace_once(models, args, kwargs)


def trace_once(models: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lineage:
    """One traced pass of the one model, which leaves torch's random state as the pass does. See `trace`."""
    notes: list[str] = []
    drop = alias = True
    random = _random_state(models)
    while True:
        attempt = Recording(models, shadow=True, drop_saved=drop, alias=alias, restore=True, random=False)
        error: Exception | None = None
        try:
            with attempt:
                models[""](*args, **kwargs)
        except Exception as raised:
            error = raised
        try:
            if drop and attempt.wanted_saved(error):
                drop = False
                notes.append("The forward differentiates: it ran a second time, with saved activations kept.")
            elif alias and isinstance(error, RuntimeError) and "not have been used in the graph" in str(error):
                alias = False  # it differentiates by a tensor that went through a module which handed out an alias of it
                notes.append("The forward ran once more with modules handing their inputs through as they are.")
            elif error is not None:
                raise error
            else:
                return Lineage(freeze(attempt._recorder, None, notes))
            _set_random_state(random)
        finally:
            attempt._recorder.release()


def model_of(model: object, who: str) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping) and who == "recording":
        wrong = [k for k, m in model.items() if not isinstance(m, nn.Module) or not isinstance(k, str) or not k or "." in k]
        if model and not wrong:
            return dict(model)
        raise TraceError(f"recording() takes a mapping of names without dots to torch.nn.Module; found {model!r}"[:500])
    found = f"the class {model.__name__}; make an instance of it" if isinstance(model, type) else f"{type(model).__name__}"
    raise TraceError(f"{who}() needs a torch.nn.Module as its first argument, found {found}")


@contextlib.contextmanager
def preserved_random_state(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put torch's random state back, on the CPU and on every CUDA device that holds a parameter or buffer."""
    state = _random_state(models)
    try:
        yield
    finally:
        _set_random_state(state)


def _random_state(models: Mapping[str, nn.Module]) -> dict[int, torch.Tensor]:
    """Per CUDA device its random state, under -1 that of the CPU."""
    devices = set()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = {
            t.device.index for m in models.values() for t in (*nn.Module.parameters(m), *nn.Module.buffers(m)) if t.device.type == "cuda"
        }
        devices.add(torch.cuda.current_device())
    return {-1: torch.get_rng_state(), **{d: torch.cuda.get_rng_state(d) for d in devices}}


def _set_random_state(state: Mapping[int, torch.Tensor]) -> None:
    for device, value in state.items():
        if device < 0:
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, device)
