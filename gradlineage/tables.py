"""What is known of torch's functions by name: what they are called here, what they write, which arguments give only a shape.

Closed tables, and rules before tables: a name that ends in ``_`` writes its first argument, a schema says what an ``OpOverload`` writes.
"""

from __future__ import annotations

import types
from typing import Any

__all__ = ["HIDDEN_WRITES", "REARRANGING", "SHAPE_ONLY", "Facts", "facts_of", "plain_name", "share_of"]

_BINARY = frozenset("add sub mul div truediv floordiv mod divmod pow matmul and or xor lshift rshift".split())

#: Operations that move values about without changing them; tables leave them out unless asked.
REARRANGING = frozenset(
    """view view_as reshape reshape_as permute transpose t T mT H mH adjoint contiguous clone expand expand_as squeeze unsqueeze flatten
    unflatten ravel getitem narrow select slice chunk split unbind tensor_split hsplit vsplit dsplit split_with_sizes movedim moveaxis swapaxes
    swapdims to float half bfloat16 double type type_as cpu cuda alias as_strided as_subclass broadcast_to broadcast_tensors repeat tile
    atleast_1d atleast_2d atleast_3d index_select unsafe_chunk unsafe_split view_as_real view_as_complex real imag resolve_conj resolve_neg
    requires_grad_ align_to refine_names rename positive _unsafe_view lift lift_fresh detach_copy view_copy""".split()
)

#: Argument positions of which only shape, dtype or device matters.
SHAPE_ONLY: dict[str, frozenset[int]] = {
    **dict.fromkeys(
        """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full new_tensor
        new_empty_strided new is_same_size""".split(),
        frozenset({0}),
    ),
    "_nested_view_from_jagged": frozenset({2}),  # a dummy that only carries a type
    **dict.fromkeys("expand_as view_as reshape_as type_as resize_as resize_as_ to".split(), frozenset({1})),
}

#: In place by name, yet the values stay what they were.
_NO_WRITE = frozenset(
    """requires_grad_ share_memory_ rename_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ detach_ as_strided_ retain_grad
    pin_memory_ align_as_ refine_names_ coalesce_ _coalesced_ conj_physical_ __contains__""".split()
) - {"conj_physical_"}

#: Those of them that give a tensor another shape.
_RESHAPES = frozenset("squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_".split())

#: Writes that leave nothing of what was there.
_OVERWRITES = frozenset(
    """zero_ fill_ copy_ normal_ uniform_ random_ exponential_ bernoulli_ cauchy_ geometric_ log_normal_ trunc_normal_ constant_ ones_ zeros_
    eye_ dirac_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_ _foreach_copy_ _foreach_zero_""".split()
)

#: Writes into a part of a tensor that leave the rest of it as it was.
_PARTIAL = frozenset(
    """setitem index_add index_copy index_fill index_put index_reduce scatter scatter_add scatter_reduce masked_fill masked_scatter
    fill_diagonal put _index_put_impl""".split()
)

#: Functions that write among their operands without a sign of it: the argument that makes them do so, and what holds where it isn't named.
HIDDEN_WRITES: dict[str, tuple[str, bool]] = {
    "batch_norm": ("training", True),
    "instance_norm": ("use_input_stats", True),
    "native_batch_norm": ("training", True),
    "cudnn_batch_norm": ("training", True),
    "fused_moving_avg_obs_fake_quant": ("observer_on", True),
    "embedding": ("max_norm", False),
    "embedding_bag": ("max_norm", False),
}

#: Functions by which Python reads a tensor's value, and the kind of decision that is; ``?`` where it hangs on the arguments.
_READS: dict[str, str] = {
    **dict.fromkeys(("__bool__", "is_nonzero"), "bool"),
    **dict.fromkeys(("__float__", "__complex__"), "float"),
    **dict.fromkeys(("item", "_local_scalar_dense"), "item"),
    **dict.fromkeys(("numpy", "__array__"), "numpy"),
    **dict.fromkeys(("equal", "allclose", "__contains__"), "equal"),
    **dict.fromkeys(("__format__", "__repr__"), "format"),
    **dict.fromkeys(
        """nonzero argwhere masked_select unique unique_consecutive _unique _unique2 unique_dim bincount nms _pack_padded_sequence
        tensor_split""".split(),
        "shape",
    ),
    "__int__": "int",
    "__index__": "index",
    "tolist": "list",
    **dict.fromkeys(
        """__getitem__ where repeat_interleave one_hot zeros ones empty full rand randn randint randperm arange linspace logspace eye view
        reshape expand repeat narrow select unflatten new_zeros new_ones new_empty new_full tile chunk split""".split(),
        "?",
    ),
}

#: Methods and properties that give no tensor: nothing to record.
_SILENT = frozenset(
    """size dim numel nelement ndimension stride storage_offset is_contiguous is_floating_point is_complex is_signed element_size get_device
    data_ptr untyped_storage storage _typed_storage is_inference is_shared is_pinned is_set_to is_conj is_neg is_same_size has_names
    __len__ __hash__ __dir__ ndimension register_hook register_post_accumulate_grad_hook retain_grad backward is_tensor sym_size sym_numel
    can_cast result_type get_default_dtype broadcast_shapes __deepcopy_ _has_torch_function""".split()
)


def plain_name(raw: str) -> str:
    """``__iadd__``, ``add_``, ``__radd__`` and ``add.Tensor`` are all ``add``."""
    name = raw.split(".", 1)[0]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[:1] in ("r", "i") and name[1:] in _BINARY:
            name = name[1:]
    stripped = name.rstrip("_=")
    return stripped or name


def _in_place(bare: str, name: str) -> bool:
    if bare.startswith("__"):
        return bare == "__setitem__" or (bare.startswith("__i") and name in _BINARY)
    return bare.endswith(("_", "="))


class Facts:
    """What one torch function does, as far as its name and schema tell."""

    __slots__ = (
        "hidden_write",
        "metadata",
        "name",
        "overwrites",
        "partial",
        "plain",
        "reads",
        "repoints",
        "reshapes",
        "shape_only",
        "silent",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        raw = getattr(func, "__name__", None) or type(func).__name__
        bare = raw.split(".", 1)[0]
        self.name = plain_name(raw)
        if bare == "grad" and getattr(func, "__module__", "") == "torch.autograd":
            self.name = "autograd.grad"
        self.silent = bare in _SILENT
        self.reads = _READS.get(bare, "")
        self.hidden_write = HIDDEN_WRITES.get(self.name)
        self.repoints = bare in ("data=", "set_")
        self.shape_only = SHAPE_ONLY.get(self.name) or SHAPE_ONLY.get(bare)
        self.metadata = bare in _NO_WRITE
        self.writes: tuple[int, ...] = ()
        schema = getattr(func, "_schema", None)
        if self.metadata:
            pass
        elif schema is not None:
            self.writes = tuple(
                i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write and not a.kwarg_only
            )
        elif _in_place(bare, self.name):
            self.writes = (0,)
        self.reshapes = bare in _RESHAPES
        self.partial = self.name in _PARTIAL or bare in ("real=", "imag=")
        self.overwrites = bool(self.writes) and bare in _OVERWRITES
        # what it makes is made of its operands, and that is all there is to say
        self.plain = not (self.writes or self.reads or self.shape_only or self.metadata or self.silent or self.repoints) and isinstance(
            func, types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType
        )


_known: dict[Any, Facts] = {}


def facts_of(func: Any) -> Facts:
    """The facts of a torch function, worked out once."""
    found = _known.get(func)
    if found is None:
        found = Facts(func)
        if len(_known) < 10_000:  # functions made in a loop must not pile up
            _known[func] = found
    return found


def share_of(part: int, whole: int) -> str:
    """A part as a reader wants it: ``62%``, ``0.3%``."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f}%" if share >= 1 or not part else f"{share:.1g}%"
