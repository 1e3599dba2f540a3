"""Collectives inside of tf.function: calls of Python, which TensorFlow runs in the program's order."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import tensorflow as tf

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.errors import CapabilityError, UnidistError
from unidist.keras import numbers
from unidist.keras.strategies.distribution import UnidistDistribution

Tensor = Any  # tf.Tensor; TensorFlow has no types


class Traced:
    """The exchanges of the ranks of the data axes in a step.

    Args:
        distribution: whose mesh and data axes these are.
        backend: the adapter in use.

    Attributes:
        failure: what a collective raised. TensorFlow reports it by an error of its own.
    """

    def __init__(self, distribution: UnidistDistribution, backend: Any) -> None:
        self.mesh = distribution.mesh
        self.axes = distribution.strategy.data_axes
        self.backend = backend
        group = self.mesh.group(self.axes, backend.rank)
        self.count, self.place = group.size, group.index
        self._coordinate = self.mesh.coordinate(backend.rank)
        self.failure: UnidistError | None = None

    def rows(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (start, length) of this rank's rows in a batch of `total`.

        Sizes are torch.chunk's, axis by axis: those of a Sharding, by which rows are joined.
        """
        start, length = tf.zeros_like(total), total
        for axis in self.axes:
            step = -(-length // self.mesh.axis_size(axis))
            before = tf.minimum(self._coordinate[axis] * step, length)
            start, length = start + before, tf.minimum(step, length - before)
        return start, length

    def lengths(self, total: int) -> set[int]:
        """Returns how many rows of a batch of `total` ranks have."""
        cut = Sharding(self.mesh, Layout(self.axes), (total,))
        return {cut.local_shape(rank)[0] for rank in self.mesh.devices}

    def join_rows(self, local: Tensor, total: Tensor) -> Tensor:
        """Joins the rows of all ranks, in order.

        Every rank goes on with the whole alike, and counts for all of its gradient: the sum over the ranks is `count`
        times the gradient of one.
        """
        start, length = self.rows(total)

        def move(value: Tensor, rows: Tensor) -> Tensor:
            self._check_rows("the model's outputs", value, rows)
            cut = Sharding(self.mesh, Layout(self.axes), (int(rows), *value.shape[1:]))
            return self.backend.redistribute(value, cut, cut.with_layout(Layout()))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def join(value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            whole = self._called(move, "outputs", [value, total], value.dtype, [None, *value.shape[1:]])
            return whole, lambda gradient: self.count * gradient[start : start + length]

        return join(local)

    def gather_rows(self, local: Tensor, total: Tensor, what: str) -> Tensor:
        """Gathers the rows of all ranks, in order, fanned out: each rank computes with them for itself.

        Gradients come back summed. An all_gather; its adjoint is a reduce_scatter.
        """
        fan = Layout(fanout=self.axes)

        def sharding(layout: Layout, value: Tensor, rows: Tensor) -> Sharding:
            return Sharding(self.mesh, layout, (int(rows), *value.shape[1:]))

        def move(value: Tensor, rows: Tensor) -> Tensor:
            self._check_rows(what, value, rows)
            cut = sharding(Layout(self.axes), value, rows)
            return self.backend.redistribute(value, cut, cut.with_layout(fan))

        def back(gradient: Tensor, rows: Tensor) -> Tensor:
            summed = sharding(fan.dual(), gradient, rows)
            return self.backend.redistribute(gradient, summed, summed.with_layout(Layout(self.axes).dual()))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def gather(value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            shape = [None, *value.shape[1:]]
            whole = self._called(move, what, [value, total], value.dtype, shape)
            return whole, lambda gradient: self._called(back, what, [gradient, total], value.dtype, shape)

        return gather(local)

    def are_equal(self, found: Tensor, wanted: Tensor, text: str) -> Tensor:
        """True when the program runs. Raises CapabilityError with the text there where two numbers differ."""

        def compare(one: Tensor, other: Tensor) -> Tensor:
            if int(one) != int(other):
                raise CapabilityError(f"{text} (found {int(one)} rows of {int(other)})")
            return tf.constant(True)

        return self._called(compare, "rows", [found, wanted], tf.bool, [])

    def _check_rows(self, what: str, value: Tensor, total: Tensor) -> None:
        """Checks the number of rows: those that were another dim for a while come back as those of all ranks.

        `expand_dims(x, 0)` does so.
        """
        own = int(self.rows(total)[1])
        if value.shape[0] != own:
            raise CapabilityError(
                f"{what}: there are {value.shape[0]} rows where this process has {own} of the batch's {int(total)}. An "
                "operation before it made another dim of the rows, which cannot be cut over Horovod with Keras on "
                "TensorFlow: set KERAS_BACKEND=torch, or do it in one layer that gives a row for each"
            )

    def of_ranks(self, values: list[Tensor]) -> list[Tensor]:
        """Returns each tensor of all ranks, stacked and fanned out: gradients come back summed.

        One all_gather.
        """
        row = tf.stack(values)
        whole = self.gather_rows(row[tf.newaxis], self.count, "batch statistics")
        whole.set_shape([self.count, *row.shape])
        return tf.unstack(whole, axis=1)  # type: ignore[no-any-return]

    def mean(self, x: Tensor, what: str) -> Tensor:
        """The mean over the ranks; not differentiable."""

        def move(value: Tensor) -> Tensor:
            partial = Sharding(self.mesh, Layout(partial=dict.fromkeys(self.axes, "mean")), tuple(value.shape))
            return self.backend.redistribute(value, partial, partial.with_layout(Layout()))

        return self._called(move, what, [x], x.dtype, x.shape)

    def joined(self, x: Tensor) -> Tensor:
        """The mean over the ranks, whose gradient counts on each: see `join_rows`."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def join(value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            return self.mean(value, "gradient"), lambda gradient: gradient

        return join(x)

    def mean_of_shares(self, value: Tensor, share: Tensor) -> Tensor:
        """The sum over the ranks of what each counts by its share of the rows."""
        value = tf.convert_to_tensor(value)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def weigh(own: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            weight = self.count * tf.cast(share, own.dtype)
            return self.mean(numbers.by_share(own, weight), "additional losses"), lambda gradient: weight * gradient

        return weigh(value)

    def once(self, value: Tensor, *, is_part: bool) -> Tensor:
        """The value, whose gradient counts on the first rank alone.

        Args:
            is_part: each rank has a part of the gradient, and they are added up. Else all have the same.
        """

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def pass_on(found: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            def back(gradient: Tensor) -> Tensor:
                whole = self.mean(gradient, "gradient") if is_part else gradient
                return tf.zeros_like(whole) if self.place else self.count * whole

            return tf.identity(found), back

        return pass_on(value)

    def mean_gradients(self, gradients: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
        """Returns each gradient's mean over the ranks, by one all_reduce for each dtype.

        Sparse ones stay sparse, with the rows of all ranks: Keras's optimizers leave rows alone that no gradient names.

        Args:
            shapes: of their variables: a gradient of a lookup does not know its own.
        """
        out = [self._mean_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        dense = {k: g for k, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)}
        for dtype in dict.fromkeys(g.dtype for g in dense.values()):
            places = [k for k, g in dense.items() if g.dtype == dtype]
            flat = tf.concat([tf.reshape(dense[k], [-1]) for k in places], 0)
            sizes = [prod(shapes[k]) for k in places]
            for k, part in zip(places, tf.split(self.mean(flat, "gradient"), sizes), strict=True):
                out[k] = tf.reshape(part, shapes[k])
        return out

    def _mean_rows(self, gradient: Any) -> Any:
        """A sparse gradient with the rows of all ranks, in the order of the batch."""
        comm, group = self.backend.comm, self.mesh.group(self.axes, self.backend.rank)

        def move(x: Tensor) -> Tensor:
            own = tf.constant([x.shape[0]])
            self.backend.record("all_gather", self.axes, group, tf.zeros([group.size], tf.int32))
            sizes = [int(n) for n in comm.all_gather(own, group, 0, (1,) * group.size)]
            joined = comm.all_gather(x, group, 0, sizes)
            self.backend.record("all_gather", self.axes, group, joined)
            return joined

        values, indices = gradient.values, gradient.indices
        whole = self._called(move, "gradient", [values], values.dtype, [None, *values.shape[1:]])
        named = self._called(move, "gradient", [indices], indices.dtype, [None])
        return tf.IndexedSlices(whole / self.count, named, gradient.dense_shape)

    def _called(
        self, function: Callable[..., Tensor], what: str, given: list[Tensor], dtype: Any, shape: Any
    ) -> Tensor:
        """function(*given), called when the program runs."""

        def call(*values: Tensor) -> Tensor:
            try:
                with events.for_purpose(what):
                    return function(*values)
            except UnidistError as error:
                self.failure = error
                raise

        out = tf.py_function(call, given, dtype)
        out.set_shape(shape)
        return out
