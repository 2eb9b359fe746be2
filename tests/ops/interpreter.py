"""Triton's interpreter without work that it does over and over; the numbers it computes are the same.

Nine tenths of its time go into the types of tensors and into tuples of their sizes, one tenth into NumPy.
"""

from dataclasses import replace

from triton.language import core, semantic
from triton.runtime import interpreter


def make_faster() -> None:
    """For the rest of this process."""
    interpreter._patch_lang = _patch_each_function_once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _scalars_first(core._unwrap_if_constexpr)
    core.dtype.__eq__ = _same_object_first(core.dtype.__eq__)
    core.block_type.__init__ = _known_shapes(core.block_type.__init__)
    core.tensor.__init__ = _known_sizes(core.tensor.__init__)
    meaning = semantic.TritonSemantic
    meaning.computation_type_impl = _known_types(meaning.computation_type_impl)
    meaning.broadcast_impl_value = _blocks_first(meaning.broadcast_impl_value)
    # Whether 32 bits hold every index: they do in tensors as small as these.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


def _patch_each_function_once(patch):
    """`triton.language` is patched for interpretation in every call of an inlined function, and stays so here."""
    done = set()

    def patch_once(function):
        if function not in done:
            done.add(function)
            patch(function)
        return interpreter._LangPatchScope()

    return patch_once


def _patch_attr(obj, name, member, builder, scope):
    """A builtin with the interpreter's semantics, without a copy of its keywords."""
    meaning = interpreter.interpreter_semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = meaning
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _cached_by_name(numpy_type):
    """The NumPy type of a Triton type: its table is built in every call."""
    known = {}

    def cached(dtype):
        if dtype.name not in known:
            known[dtype.name] = numpy_type(dtype)
        return known[dtype.name]

    return cached


def _scalars_first(unwrap):
    """Most of what is asked for its value is a number already."""
    constexpr, plain = core.constexpr, {int, float, bool, str, type(None)}

    def value(one):
        kind = type(one)
        return one.value if kind is constexpr else one if kind in plain else unwrap(one)

    return value


def _same_object_first(equal):
    return lambda one, other: one is other or equal(one, other)


def _known_shapes(init):
    """The type of a block: its shape is checked, and its name made, once."""
    known = {}

    def fill(block, element_ty, shape):
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = element_ty.name, *[core._unwrap_if_constexpr(size) for size in sizes]
        if key not in known:
            init(block, element_ty, shape)
            known[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = known[key]

    return fill


def _known_sizes(init):
    """A tensor: its sizes as constants are made once for each shape."""
    known = {}

    def fill(tensor, handle, type):
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            init(tensor, handle, type)
            known[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known[key]

    return fill


def _known_types(common):
    """The type in which two operands meet."""
    known = {}

    def cached(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = common(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    return cached


def _blocks_first(broadcast):
    """Blocks of one rank are broadcast without tuples of constants; scalars and other ranks as Triton does it."""

    def faster(self, lhs, rhs):
        one, two = lhs.type, rhs.type
        if not (one.is_block() and two.is_block()):
            return broadcast(self, lhs, rhs)
        left, right = one.shape.values, two.shape.values
        if left == right:
            return lhs, rhs
        shape = [b if a == 1 else a for a, b in zip(left, right, strict=False)]
        if len(left) != len(right) or any(b not in (1, size) for b, size in zip(right, shape, strict=True)):
            return broadcast(self, lhs, rhs)
        return _spread(self, lhs, shape), _spread(self, rhs, shape)

    return faster


def _spread(self, tensor, shape):
    if tensor.type.shape.values == shape:
        return tensor
    kind = core.block_type(tensor.type.scalar, shape)
    return self.make_tensor(self.builder.create_broadcast(tensor.handle, shape), kind)
