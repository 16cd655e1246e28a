"""The private parts of torch that gradlineage stands on, each with what it is for. When one fails on a new torch, that is what to mend."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradlineage import private


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_hooks_can_look_at_tensors_unseen_by_modes() -> None:
    x = torch.ones(2)
    with Seen() as mode:
        with private.disabled():
            assert x.shape == (2,) and not x.requires_grad
        assert mode.names == []
        x.add(1)
    assert mode.names == ["add"]


def test_a_mode_leaves_from_under_others() -> None:
    below, above = Seen(), Seen()
    with below:
        above.__enter__()  # type: ignore[no-untyped-call]
        private.leave_mode(below)
        torch.ones(2).add(1)
        assert (len(below.names), len(above.names)) == (0, 2)
        private.leave_mode(above)
        private.leave_mode(above)
        below.__enter__()  # type: ignore[no-untyped-call]


def test_a_function_can_be_shown_to_subclasses_again() -> None:
    class Sub(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    x = torch.ones(2).as_subclass(Sub)
    with private.disabled():
        x.add(1)
        assert Sub.calls == 0
        with private.enabled():
            x.add(1)
    assert Sub.calls == 1


def test_sequence_numbers_tell_which_operation_made_a_node() -> None:
    x = torch.ones(2, requires_grad=True)
    before = private.sequence_number()
    y = x * 2
    assert y.grad_fn is not None and y.grad_fn._sequence_nr() == before == private.sequence_number() - 1


def test_a_backward_under_way_can_be_told() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(private.backward_task()))  # type: ignore[no-untyped-call]
    assert private.backward_task() == -1
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert seen[0] != -1 and private.backward_task() == -1


def test_transforms_can_be_told_and_their_wrappers_opened() -> None:
    def look(x: Tensor) -> Tensor:
        wrapped = private.functorch
        assert private.level() is not None and wrapped.is_functorch_wrapped_tensor(x) and wrapped.is_batchedtensor(x)
        assert wrapped.get_unwrapped(x) is rows
        return x * 2

    rows = torch.ones(3, 2)
    assert private.level() is None
    torch.func.vmap(look)(rows)


def test_control_flow_has_a_kernel_in_plain_python() -> None:
    cond = torch.ops.higher_order.cond
    assert isinstance(cond, private.HigherOrderOperator)
    assert private.dense_kernel(cond)(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.zeros(1),)).item() == 1


def test_a_dispatch_mode_can_be_told() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert private.dispatch_mode() is None
    with FakeTensorMode() as mode:
        assert private.dispatch_mode() is mode


def test_an_alias_shares_memory_and_gradient_and_is_no_view() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    alias = private.unsafe_view(x, x.shape)
    assert alias is not x and alias.data_ptr() == x.data_ptr() and not alias._is_view()
    assert alias.grad_fn.next_functions[0][0] is x.grad_fn


def test_the_frame_of_a_call_and_its_keyword_arguments_are_found() -> None:
    found: list[Any] = []

    class Layer(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            return x * scale

    def hook(module: nn.Module, args: Any) -> None:
        frame: types.FrameType | None = sys._getframe(1)
        assert frame is not None
        found.append(frame.f_locals["kwargs"])
        while frame is not None and frame.f_code is not private.CALL:
            frame = frame.f_back
        found.append(frame)

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        Layer()(torch.ones(1), scale=2.0)
    finally:
        handle.remove()
    assert found[0] == {"scale": 2.0} and found[1] is not None


def test_a_hook_on_all_modules_can_be_the_first_and_sees_failures() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *args: order.append(name)

    register = nn.modules.module.register_module_forward_hook
    layer = nn.Linear(2, 2)
    handles = [layer.register_forward_hook(note("own")), register(note("theirs")), register(note("ours"), always_call=True)]
    private.global_hook_first(handles[-1].id)
    try:
        layer(torch.ones(1, 2))
        assert order == ["ours", "theirs", "own"]
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            layer(torch.ones(1, 3))
        assert order[3:] == ["ours"]
    finally:
        for handle in handles:
            handle.remove()


def test_the_custom_function_of_a_node_is_known() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    x = torch.ones(1, requires_grad=True)
    assert private.forward_class(Double.apply(x).grad_fn) is Double
    assert private.forward_class((x * 2).grad_fn) is None


def test_views_bases_and_versions_can_be_asked_for() -> None:
    x = torch.ones(4)
    view = x[:2]
    assert view._is_view() and view._base is x and not x._is_view()
    version = x._version
    view.add_(1)
    assert x._version == view._version == version + 1


def test_a_storage_has_one_address_and_takes_a_weak_reference() -> None:
    import weakref

    x = torch.ones(4)
    ref = weakref.ref(x.untyped_storage())
    assert x[:2].untyped_storage()._cdata == x.untyped_storage()._cdata != torch.ones(4).untyped_storage()._cdata
    assert ref() is not None
    del x
    assert ref() is None


def test_modules_keep_what_they_own_in_dicts() -> None:
    layer = nn.BatchNorm1d(2)
    net = nn.Sequential(layer)
    assert (
        layer._parameters["weight"] is layer.weight and layer._buffers["running_mean"] is layer.running_mean and net._modules["0"] is layer
    )
    assert not layer._forward_pre_hooks and not layer._forward_hooks
    handle = layer.register_forward_pre_hook(lambda m, args: None)
    assert len(layer._forward_pre_hooks) == 1
    handle.remove()


def test_every_private_name_has_a_test() -> None:
    text = inspect.getsource(sys.modules[__name__])
    missing = [name for name in private.__all__ if f"private.{name}" not in text]
    assert not missing
