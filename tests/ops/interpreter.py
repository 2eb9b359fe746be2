"""Patches that make Triton's interpreter skip repeated work, without changing its results; with them that of Triton 3.6
also runs all kernels.

Nine tenths of its time are spent on types of tensors and tuples of their sizes, one tenth in NumPy.
"""

from dataclasses import replace

from triton.language import core, semantic
from triton.runtime import interpreter


def patch_interpreter() -> None:
    """Patch the interpreter for the rest of this process."""
    interpreter._patch_lang = _patch_each_function_once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang_tensor = _scalars_as_indices(interpreter._patch_lang_tensor)
    interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _scalars_first(core._unwrap_if_constexpr)
    core.dtype.__eq__ = _same_object_first(core.dtype.__eq__)
    core.block_type.__init__ = _cached_block_types(core.block_type.__init__)
    core.tensor.__init__ = _cached_tensor_sizes(core.tensor.__init__)
    semantics = semantic.TritonSemantic
    semantics.to_tensor = _tensors_first(semantics.to_tensor)
    semantics.computation_type_impl = _cached_common_types(semantics.computation_type_impl)
    semantics.broadcast_impl_value = _equal_ranks_first(semantics.broadcast_impl_value)
    semantics.binary_op_type_checking_impl = _broadcast_by_numpy(semantics.binary_op_type_checking_impl)
    interpreter.TensorHandle.__post_init__ = lambda handle: None  # checks the size of NumPy's dtype again
    # Skip the check for overflow of 32-bit indices: the test tensors are small.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    if not hasattr(interpreter.InterpreterBuilder, "get_bf16"):  # Triton 3.6
        interpreter.InterpreterBuilder.get_bf16 = _bf16_constant


def _patch_each_function_once(patch):
    """The interpreter patches `triton.language` in every call of an inlined function; patch it once and leave it."""
    patched = set()

    def patch_once(function):
        if function not in patched:
            patched.add(function)
            patch(function)
        return interpreter._LangPatchScope()

    return patch_once


def _patch_attr(obj, name, member, builder, scope):
    """Bind a builtin to the interpreter's semantics, without copying its keyword arguments."""
    semantics = interpreter.interpreter_semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantics
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _bf16_constant(builder, value):
    """As in Triton 3.9."""
    return builder.create_fp_trunc(builder.get_fp32(value), core.bfloat16)


def _scalars_as_indices(patch):
    """Let scalars be indices: Triton 3.6 converts an array of one value to a number, which NumPy 2.4 refuses."""

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    return patch_with_index


def _cached_by_name(numpy_type):
    """Cache the NumPy dtype of a Triton dtype: the original builds its table in every call."""
    cache = {}

    def cached(dtype):
        if dtype.name not in cache:
            cache[dtype.name] = numpy_type(dtype)
        return cache[dtype.name]

    return cached


def _scalars_first(unwrap):
    """Most arguments to unwrap are plain values already."""
    constexpr, plain = core.constexpr, {int, float, bool, str, type(None)}

    def value(argument):
        kind = type(argument)
        return argument.value if kind is constexpr else argument if kind in plain else unwrap(argument)

    return value


def _tensors_first(convert):
    """Most values to convert are tensors already. Constexprs are unwrapped here, because Triton 3.6 refuses a tuple
    in one."""

    def to_tensor(self, value, check_type=True):
        if type(value) is core.tensor:
            return value
        return convert(self, value.value if type(value) is core.constexpr else value, check_type)

    return to_tensor


def _same_object_first(equal):
    return lambda a, b: a is b or equal(a, b)


def _cached_block_types(init):
    """Cache block types: check the shape and build the name once."""
    cache = {}

    def fill(block, element_ty, shape):
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = element_ty.name, *[core._unwrap_if_constexpr(size) for size in sizes]
        if key not in cache:
            init(block, element_ty, shape)
            cache[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = cache[key]

    return fill


def _cached_tensor_sizes(init):
    """Cache the sizes of tensors, wrapped as constexprs, by shape."""
    cache = {}

    def fill(tensor, handle, type):
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in cache:
            init(tensor, handle, type)
            cache[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = cache[key]

    return fill


def _cached_common_types(common):
    """Cache the common type of two operands."""
    cache = {}

    def cached(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in cache:
            cache[key] = common(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return cache[key]

    return cached


def _equal_ranks_first(broadcast):
    """Broadcast blocks of equal rank without tuples of constexprs; leave scalars and other ranks to Triton."""

    def faster(self, lhs, rhs):
        lhs_type, rhs_type = lhs.type, rhs.type
        if not (lhs_type.is_block() and rhs_type.is_block()):
            return broadcast(self, lhs, rhs)
        left, right = lhs_type.shape.values, rhs_type.shape.values
        if left == right:
            return lhs, rhs
        shape = [b if a == 1 else a for a, b in zip(left, right, strict=False)]
        if len(left) != len(right) or any(b not in (1, size) for b, size in zip(right, shape, strict=True)):
            return broadcast(self, lhs, rhs)
        return _broadcast_to(self, lhs, shape), _broadcast_to(self, rhs, shape)

    return faster


def _broadcast_to(self, tensor, shape):
    if tensor.type.shape.values == shape:
        return tensor
    kind = core.block_type(tensor.type.scalar, shape)
    return core.tensor(self.builder.create_broadcast(tensor.handle, shape), kind)


def _broadcast_by_numpy(convert):
    """Give two operands of one type the type of the result without broadcasting them, which the operation itself does
    in NumPy; numbers become constants of this type. Leave conversions and what is not allowed to Triton."""
    types = {}

    def operands(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        left, right = lhs, rhs
        if arithmetic_check:
            if type(rhs) in (int, float):
                right = _constant(self, rhs, lhs)
            elif type(lhs) in (int, float):
                left = _constant(self, lhs, rhs)
        if type(left) is core.tensor and type(right) is core.tensor:
            key = left.type.name, right.type.name, allow_lhs_ptr, allow_rhs_ptr
            if key not in types:
                types[key] = _types_of_operands(left, right, allow_lhs_ptr, allow_rhs_ptr)
            if types[key] is not None:
                left_type, right_type = types[key]
                return (
                    left if left.type is left_type else core.tensor(left.handle, left_type),
                    right if right.type is right_type else core.tensor(right.handle, right_type),
                )
        return convert(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return operands


def _constant(self, number, tensor):
    """The number as a constant of the type of the tensor; the number itself where Triton may choose another type."""
    if type(tensor) is core.tensor:
        integer = type(number) is int and -(2**31) <= number < 2**31
        if tensor.dtype.is_ptr():
            return self.scalar_constant(number, core.int32) if integer else number
        if tensor.dtype.name == "fp32" or (integer and tensor.dtype.name in ("int32", "int64")):
            return self.scalar_constant(number, tensor.dtype)
    return number


def _types_of_operands(left, right, allow_left_pointer, allow_right_pointer):
    """The types of the operands after broadcasting, or None."""
    a, b = left.dtype, right.dtype
    if a.is_ptr() or b.is_ptr():
        if not (b.is_int() and allow_left_pointer if a.is_ptr() else a.is_int() and allow_right_pointer):
            return None
    elif a.name != b.name or a.name not in ("int1", "int32", "int64", "fp32", "fp64"):
        return None
    shapes = [operand.type.shape.values for operand in (left, right) if operand.type.is_block()]
    if not shapes:
        return left.type, right.type
    if len({len(shape) for shape in shapes}) > 1:
        return None
    shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
    if any(size not in (1, largest) for sizes in shapes for size, largest in zip(sizes, shape, strict=True)):
        return None
    return core.block_type(a, shape), core.block_type(b, shape)
