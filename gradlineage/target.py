"""From what a command line names to a model and its inputs. Every mistake is told as what was found, what was expected and an example."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradlineage.errors import UsageError, a_kind

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["InputSpec", "build", "check_call", "find", "make_inputs", "parse_input", "parse_settings", "parse_target", "read_batches"]

_DTYPES = "float16 bfloat16 float32 float64 complex64 complex128 uint8 int8 int16 int32 int64 bool".split()
_INPUT = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)=)?(?:(?P<plain>\d+(?:x\d+)*)|(?P<dtype>[a-z]\w*)\[(?P<shape>(?:\d+(?:,\d+)*)?)\])(?:<(?P<bound>[\d.]+(?:e\d+)?))?"
)
_GUESSES = {"mask": "bool[1,16]", "ids|token|index|label": "int64[1,16]<1000", "": "float32[1,3,224,224]"}  # by the argument's name


class InputSpec(NamedTuple):
    """One ``--input``: a tensor to draw, or with ``file`` one to read. Without a name it is passed by position."""

    name: str | None = None
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    bound: float | None = None
    file: str | None = None


def parse_input(text: str) -> InputSpec:
    """Read ``1x3x299x299``, ``x=float32[1,3,8,8]``, ``ids=int64[1,16]<1000`` or ``@batch.pt``.

    Raises:
        UsageError: anything else.

    Example:
        >>> parse_input("ids=int64[1,16]<1000")
        InputSpec(name='ids', dtype='int64', shape=(1, 16), bound=1000.0, file=None)
    """
    if text.startswith("@") and len(text) > 1:
        return InputSpec(file=text[1:])
    match = _INPUT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise UsageError(f"--input {text!r} is no input; expected 1x3x299x299, x=float32[1,3,8,8], 'ids=int64[1,16]<1000' or @batch.pt")
    dtype = match["dtype"] or "float32"
    sizes = re.findall(r"\d+", match["plain"] or match["shape"] or "")
    try:
        bound = float(match["bound"]) if match["bound"] else None
        shape = tuple(map(int, sizes))
    except ValueError:  # "1.2.3", or more digits than Python reads
        raise UsageError(f"--input {text[:200]!r}: a size or bound in it is no number") from None
    if bound is not None and not bound < 2**63:
        raise UsageError(f"--input {text[:200]!r}: the bound is larger than any dtype holds")
    if dtype not in _DTYPES:
        raise UsageError(f"--input {text!r}: no dtype {dtype!r}; expected one of {', '.join(_DTYPES)}")
    if bound is not None and (dtype == "bool" or ("int" in dtype and (bound < 1 or bound % 1))):
        raise UsageError(
            f"--input {text!r}: expected a whole number from 1 on as the bound of integers, as in int64[1,16]<1000, none for bool"
        )
    return InputSpec(match["name"], dtype, shape, bound)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """``["width=64", "weights=None", "act=relu"]`` as keyword arguments: Python literals, else text."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--set {text!r} is no setting; expected KEY=VALUE, as in --set weights=None")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            settings[key] = value
    return settings


def parse_target(target: str) -> tuple[str, str]:
    """The module or file, and the name in it."""
    place, _, name = target.rpartition(":")
    example = "expected for example torchvision.models:resnet18, path/net.py:Net or a saved net.json"
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"TARGET {target!r} is neither module:callable nor file.py:callable; {example}")
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"TARGET {target!r}: there is no file {place} in {os.getcwd()}; {example}")
    return place, name


def find(target: str) -> Any:
    """Import a target's module or file, which runs its code, and look the name up in it. What the code raises comes through."""
    place, name = parse_target(target)
    found = _import(place, target)
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
            own = [n for n in names if getattr(getattr(found, n), "__module__", "") == getattr(found, "__name__", None)]
            near = ", ".join(difflib.get_close_matches(part, names, n=4) or own[:4]) or "nothing to build a model with"
            raise UsageError(f"TARGET {target!r}: {place} has no {part!r}; it has {near}")
        found = getattr(found, part)
    return found


def _import(place: str, target: str) -> Any:
    path = Path(place)
    folder = str(path.resolve().parent) if path.suffix == ".py" else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # what lies beside it can be imported
    if path.suffix == ".py":
        name = path.stem if path.stem not in sys.modules else "__gradlineage_target__"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
        spec.loader.exec_module(module)
        return module
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"TARGET {target!r}: {place!r} is no name of a module; write package.module:name, or path/net.py:Net")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, one that it imports is not
        told = f"TARGET {target!r}: there is no module {error.name!r}; run where it can be imported from, or name the file: path/net.py:Net"
        raise UsageError(told) from None


def build(found: Any, target: str, settings: dict[str, Any], device: str | None) -> nn.Module:
    """The model: the object itself if it is one, else what it returns when called with the settings. On ``device`` if one is given."""
    from torch import nn

    given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    expected = "expected a torch.nn.Module, its class or a function that returns one"
    if isinstance(found, nn.Module):
        if settings:
            raise UsageError(f"{target} is a model already and takes no --set ({given}); name its class or a function that returns it")
        model = found
    elif callable(found):
        if (wrong := _mismatch(found, (), settings)) is not None:
            raise UsageError(f"{target}{wrong[1]} cannot be called with ({given}): {wrong[0]}; give its arguments as --set KEY=VALUE")
        model = found(**settings)
    else:
        raise UsageError(f"{target} is {a_kind(found)}; {expected}")
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} returned {a_kind(model)}; {expected}")
    return model.to(_device(device)) if device else model


def _device(name: str) -> torch.device:
    import torch

    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {name!r} cannot be used: {_first_line(error)}; expected cpu, cuda, cuda:1 or the like") from None


def make_inputs(specs: Iterable[InputSpec], model: nn.Module, device: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments, on the device given or that of the model's first parameter."""
    import torch

    place = _device(device) if device else next((p.device for p in model.parameters()), torch.device("cpu"))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        value = _draw(spec).to(place) if spec.file is None else _read(spec.file, place)
        if spec.name is not None:
            kwargs[spec.name] = value
        elif isinstance(value, dict):
            kwargs |= value
        else:
            args += value if isinstance(value, list | tuple) else [value]
    return args, kwargs


def _draw(spec: InputSpec) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return (torch.randn(spec.shape) if spec.bound is None else torch.rand(spec.shape) * spec.bound).to(dtype)
        return torch.randint(int(spec.bound or 2), spec.shape, dtype=dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        below = "" if spec.bound is None else f" below {spec.bound:g}"
        size = "x".join(map(str, spec.shape))
        raise UsageError(f"--input {spec.dtype}[{size}]{below} cannot be drawn: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read(file: str, device: torch.device, option: str = "--input @") -> Any:
    import torch

    expected = "expected what torch.save wrote of a tensor, a list or tuple (by position) or a dict with text as keys (by name)"
    try:
        value = torch.load(file, map_location=device, weights_only=True)
    except OSError as error:
        raise UsageError(f"{option}{file}: {error.strerror or error}; {expected}") from None
    except Exception as error:  # unpickling damaged or foreign files raises anything
        raise UsageError(f"{option}{file} cannot be read: {_first_line(error)}; {expected}") from None
    if not isinstance(value, torch.Tensor | list | tuple | dict) or (
        isinstance(value, dict) and not all(isinstance(k, str) for k in value)
    ):
        raise UsageError(f"{option}{file} holds {a_kind(value)}; {expected}")
    return value


def read_batches(path: Path, model: nn.Module, device: str | None) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Positional and keyword arguments of each of many inputs.

    Args:
        path: a folder of files that ``torch.save`` wrote, one input each, taken in the order of their names; or one such file with a list of
            inputs, or with a tensor whose first dimension numbers them. An input is a tensor, a list or tuple by position or a dict by name.
        model, device: as for `make_inputs`.

    Raises:
        UsageError: no such path, nothing in it, or something else in it.
    """
    import torch

    place = _device(device) if device else next((p.device for p in model.parameters()), torch.device("cpu"))
    expected = "expected a folder of files that torch.save wrote, or one with a list of inputs or a tensor"
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        if not files:
            raise UsageError(f"--inputs {path}: the folder is empty; {expected}")
        batches: Iterable[Any] = (_read(str(file), place, "--inputs ") for file in files)
    else:
        found = _read(str(path), place, "--inputs ")
        if isinstance(found, dict) or (isinstance(found, torch.Tensor) and not found.dim()) or not len(found):
            what = (
                "one dict"
                if isinstance(found, dict)
                else "a single number"
                if isinstance(found, torch.Tensor) and not found.dim()
                else "no input"
            )
            raise UsageError(f"--inputs {path} holds {what}; {expected}")
        batches = torch.split(found, 1) if isinstance(found, torch.Tensor) else found
    for batch in batches:
        if isinstance(batch, dict):
            yield [], batch
        elif isinstance(batch, list | tuple):
            yield list(batch), {}
        elif isinstance(batch, torch.Tensor):
            yield [batch], {}
        else:
            raise UsageError(f"--inputs {path}: an input is {a_kind(batch)}; expected a tensor, a list or tuple, or a dict by name")


def check_call(model: nn.Module, target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Say what forward takes before running it without that."""
    if (wrong := _mismatch(model.forward, args, kwargs)) is None:
        return
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [p.name for p in wrong[1].parameters.values() if p.default is p.empty and p.kind not in optional]
    guesses = (f"--input '{n}={next(spec for pattern, spec in _GUESSES.items() if re.search(pattern, n))}'" for n in required)
    raise UsageError(
        f"{type(model).__name__}.forward{wrong[1]} cannot be called with what was given: {wrong[0]}\n"
        f"give its tensors with --input, for example: gradlineage show {target} {' '.join(guesses) or '--input 1x3x224x224'}"
    )


def _mismatch(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[TypeError, inspect.Signature] | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C or scripted: the call itself will tell
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error, signature
    return None
