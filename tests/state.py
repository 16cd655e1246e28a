# mypy: disable-error-code="no-untyped-call,attr-defined"
"""All that a trace could leave behind, in a model and in the process, as plain values that can be compared."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as globals_of_modules
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["Facts", "bits", "changes", "hooks_of", "model_facts", "process_facts", "state_of"]

Facts = dict[str, object]
"""By what it is called: a value that compares, or an identity."""

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_non_persistent_buffers_set",
)  # fmt: skip


def hooks_of(model: nn.Module) -> list[str]:
    """Every forward hook and pre-hook in a model, the users' own too."""
    return [f"{path}.{name}" for path, module in model.named_modules() for name in _HOOKS[:5] for _ in getattr(module, name, ())]


def process_facts() -> Facts:
    """Modes, switches, random states: what is the process's or the thread's."""
    found: Facts = {
        "function modes": [id(mode) for mode in _get_current_function_mode_stack()],
        "dispatch modes": [id(mode) for mode in _get_current_dispatch_mode_stack()],
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "saved tensor hooks allowed": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "attention": (
            torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "swap": (torch.__future__.get_swap_module_params_on_conversion(), torch.__future__.get_overwrite_module_params_on_conversion()),
        "random": torch.get_rng_state().numpy().tobytes(),
        "random of Python": random.getstate(),
        "random of numpy": str(numpy.random.get_state()),
        "recursion limit": sys.getrecursionlimit(),
        "tracing": (id(sys.gettrace()), id(sys.getprofile()), id(sys.excepthook), id(threading.excepthook), id(sys.unraisablehook)),
        "warnings": (list(map(str, warnings.filters)), id(warnings.showwarning)),
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "import path": list(sys.path),
        "handling": id(sys.exc_info()[1]) if sys.exc_info()[1] is not None else None,
    }  # fmt: skip
    if "torch._dynamo" in sys.modules:
        found["stance"] = str(sys.modules["torch._dynamo.eval_frame"]._stance)
    for name, value in vars(globals_of_modules).items():
        if name.startswith("_global") and isinstance(value, dict):
            found[name] = [(key, id(hook)) for key, hook in value.items()]
    return found


def model_facts(model: nn.Module, versions: bool = False) -> Facts:
    """Everything on and in a model, bit for bit. ``versions``: the counters of writes too, which a pass that writes moves on."""
    modules = list(model.named_modules(remove_duplicate=False))
    found: Facts = {"training": [(path, m.training) for path, m in modules], "types": [(path, type(m)) for path, m in modules]}
    for path, module in model.named_modules():
        found[f"{path} attributes"] = sorted(module.__dict__)
        found[f"{path} attribute values"] = {name: id(value) for name, value in module.__dict__.items()}
        for name in _HOOKS:
            held = getattr(module, name, None)
            found[f"{path}.{name}"] = [(k, id(v)) for k, v in held.items()] if isinstance(held, Mapping) else sorted(map(str, held or ()))
        for kind in ("_parameters", "_buffers"):
            members = getattr(module, kind)
            found[f"{path}.{kind}"] = [(name, id(tensor)) for name, tensor in members.items()]
            for name, tensor in members.items():
                if tensor is not None:
                    found.update({f"{path}.{name}: {what}": value for what, value in _tensor(tensor, versions)})
    return found


def _tensor(tensor: Tensor, versions: bool) -> Iterator[tuple[str, object]]:
    yield "type", type(tensor)
    yield "attributes", sorted(tensor.__dict__)
    yield "backward hooks", None if tensor._backward_hooks is None else [(k, id(v)) for k, v in tensor._backward_hooks.items()]
    if is_lazy(tensor):
        return
    yield (
        "looks",
        (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf),
    )
    yield "memory", (tensor.data_ptr(), tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes())
    yield "values", bits(tensor)
    yield "gradient", None if tensor.grad is None else (id(tensor.grad), bits(tensor.grad))
    if versions:
        yield "version", tensor._version


def bits(tensor: Tensor) -> bytes:
    """The values as they lie in memory, whatever their dtype."""
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)  # numpy would keep the memory itself from being resized
    return copied.reshape(-1).view(torch.uint8).numpy().tobytes()


def state_of(model: nn.Module, versions: bool = False) -> Facts:
    """The model's and the process's facts in one."""
    return {**{f"process: {name}": value for name, value in process_facts().items()}, **model_facts(model, versions)}


def changes(before: Facts, after: Facts) -> list[str]:
    """What differs, in words short enough to read."""
    found = []
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after:
            found.append(f"{name} {'came' if name in after else 'went'}")
        elif before[name] != after[name]:
            found.append(f"{name}: {str(before[name])[:80]} became {str(after[name])[:80]}")
    return found
