"""Finds what torch's autograd keeps of a run for backward, each memory once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import keras

from unidist.keras.patching.compat import global_state, is_float_dtype, is_tensor, tree
from unidist.keras.planning.activations import Seen, SeenTensor, as_in_a_step


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Lets Keras compute on torch's meta device as on any other: its tensors have no values."""
    import torch

    with keras.device("meta"):
        # Keras copies a tensor whose device is not that of the scope, and a device is no text to torch. And where Keras
        # reads the text "meta" it infers shapes by rules of its own.
        global_state.set_global_attribute("torch_device", torch.device("meta"))
        yield


class Saved(Seen):
    """A run in which autograd is at work. Weights do not count: they are there anyway.

    Attributes:
        is_shadow: a layer is called on tensors that have no values: its weights have none either.
    """

    def __init__(self, marking: bool) -> None:
        super().__init__(marking)
        self.is_shadow = False
        # The number of kernels of the stack that is at work, and the address of what it was given.
        self._stack = 0, 0
        # By its address, memory that was counted, and of a weight the variable's id. Nothing is kept alive by it.
        self._memory: dict[int, tuple[Any, int | None]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        import torch

        token = as_in_a_step.set(True)
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x):
                yield
        finally:
            as_in_a_step.reset(token)

    def add(self, values: Any) -> None:
        for x in filter(is_tensor, tree.flatten(values)):
            self._keep(x, self._behind(x))

    @contextlib.contextmanager
    def computed_again(self, given: Any) -> Iterator[None]:
        known = set(self._memory)
        with super().computed_again(given):
            known |= set(self._memory)
            yield

    def _forget(self, known: set[int]) -> None:
        for key, (_, variable) in list(self._memory.items()):
            if variable is None and key not in known:
                del self._memory[key]

    def weight(self, x: Any, variable: Any) -> Any:
        """A variable's value, as the run reads it."""
        self.count(x, id(variable))
        self.read.append(id(variable))
        return x.requires_grad_(variable.trainable and x.is_floating_point())

    def shadow(self, variable: Any) -> Any:
        """A variable's value in a call on tensors without values."""
        import torch

        from unidist.keras.patching.compat import torch_core

        dtype = torch_core.to_torch_dtype(variable.dtype)
        return self.weight(torch.empty(tuple(variable.shape), dtype=dtype, device="meta"), variable)

    @contextlib.contextmanager
    def in_stack(self, size: int, given: Any) -> Iterator[None]:
        """Notes what is kept inside, but for what is given, as of so many kernels."""
        before, self._stack = self._stack, (size, _address(given))
        try:
            yield
        finally:
            self._stack = before

    def of_layer(self, call: Callable[[Any], Any], x: Any, y: Any, activated: bool, marked: int | None) -> Any:
        """Returns what a layer gives, `y`, in place of what it would compute of x: kept is what it would keep.

        Args:
            call: the layer's.
            activated: the layer has an activation function.
            marked: the candidate, where what it gives is NaN.
        """
        import torch

        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
        kept: list[Any] = []

        def keep(tensor: Any) -> Any:
            kept.append(tensor)
            return tensor

        with self._shadows(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = call(like)
        y.requires_grad_(out.requires_grad)
        behind = self._behind(x)
        self.source = self.source if marked is None else marked
        same = {_address(like): (x, behind), _address(out): (y, self._behind(y))}
        for tensor in kept:
            # What the activation takes is cut as what is given; copies are cut as what is taken.
            of_output = activated and tensor.numel() == out.numel()
            self._keep(*same.get(_address(tensor), (tensor, self._behind(y) if of_output else behind)))
        return y

    @contextlib.contextmanager
    def _shadows(self) -> Iterator[None]:
        self.is_shadow = True
        try:
            with without_values():
                yield
        finally:
            self.is_shadow = False

    def _pack(self, x: Any) -> None:
        """Takes the place of what autograd would keep: no backward comes."""
        self._keep(x, self._behind(x), goes_along=not _is_float(x))

    def _keep(self, x: Any, behind: int | None, *, goes_along: bool = False) -> None:
        counted = self.counted(x)
        if counted is not False and counted is not True:
            self.weights.append(counted)
        elif not counted and x.ndim:
            self.count(x)
            dtype = keras.backend.standardize_dtype(x.dtype)
            size, given = self._stack
            stack = 0 if _address(x) == given else size
            self.tensors.append(SeenTensor(held_shape(x), dtype, behind, self.total(x), self.source, goes_along, stack))

    def counted(self, x: Any) -> bool | int:
        """Returns whether a tensor's memory was counted; a weight's variable by its id."""
        memory, variable = self._memory.get(_address(x), (None, None))
        # An address is other memory's as soon as its own is gone.
        is_known = memory is not None and memory() is x.untyped_storage()
        return is_known if variable is None or not is_known else variable

    def count(self, x: Any, variable: int | None = None) -> None:
        self._memory[_address(x)] = weakref.ref(x.untyped_storage()), variable

    def total(self, x: Any) -> float | None:
        """The sum of a tensor's values, where runs are compared by it."""
        is_compared = self.marking and not x.is_meta and _is_float(x)
        return float(x.detach().double().sum()) if is_compared else None

    def _behind(self, x: Any) -> int | None:
        if not self.marking or self.source is None or x.is_meta:
            return None
        if _is_float(x):
            return self.source if bool(x.isnan().any()) else None
        return self._behind_last(held_shape(x))

    def _behind_last(self, shape: tuple[int, ...]) -> int | None:
        """Returns what a mask of a shape is behind: it is cut as what it masks."""
        return next((one.behind for one in reversed(self.tensors) if one.shape == shape), None)

    def again(self, one: SeenTensor, candidate: Callable[[int | None], int | None]) -> None:
        """Notes a tensor as one that was kept before, of a layer with other candidates."""
        if one.again:  # of several that are alike one is enough
            return
        behind, source = None if one.behind is None else candidate(one.behind), candidate(one.source)
        if one.goes_along and source is not None:
            behind = self._behind_last(one.shape)
        self.tensors.append(replace(one, behind=behind, source=source))


def _is_float(x: Any) -> bool:
    return is_float_dtype(keras.backend.standardize_dtype(x.dtype))  # type: ignore[no-any-return]


def _address(x: Any) -> int:
    return int(x.untyped_storage()._cdata)


def held_shape(x: Any) -> tuple[int, ...]:
    """The shape of all that a tensor's memory holds."""
    base = x if x._base is None else x._base
    shape = tuple(1 if stride == 0 else n for n, stride in zip(base.shape, base.stride(), strict=True))
    held = x.untyped_storage().nbytes() // x.itemsize
    return shape if base.dtype == x.dtype and prod(shape) == held else (held,)
