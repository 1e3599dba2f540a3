"""Views: each process reads the whole data and takes its own rows, so all must read the same.

A digest of the first batches of each epoch, and of one now and then, is compared: a shuffle that has no seed, or a
generator of the user's own, shows there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from unidist.backends.protocol import Array
from unidist.errors import DesyncError
from unidist.keras.consistency.processes import Processes
from unidist.keras.patching.compat import tree

# Batches of an epoch that are compared: so many at its start, then one of so many.
FIRST, EVERY = 2, 256


# What sparse and ragged values of TensorFlow, JAX and SciPy are made of.
_PARTS = ("values", "data", "indices", "indptr", "row", "col", "row_splits")


def digest(batch: Any) -> int:
    """31 bits of a batch's shapes, dtypes and values.

    Example:
        >>> import numpy as np
        >>> digest(np.zeros(3)) == digest(np.zeros(3)), digest(np.zeros(3)) == digest(np.ones(3))
        (True, False)
    """
    found = 0
    for leaf in tree.flatten(batch):
        for kind, value in _arrays(leaf):
            found = zlib.crc32(f"{kind}{value.dtype}{value.shape}".encode(), found)
            found = zlib.crc32(np.ascontiguousarray(value).tobytes(), found)
    return found & 0x7FFFFFFF


def _arrays(leaf: Any) -> Iterator[tuple[str, Array]]:
    """(shape and dtype, the bits) of all that a value holds, in arrays of NumPy."""
    if leaf is None or not hasattr(leaf, "shape"):
        return
    kind = f"{getattr(leaf, 'dtype', '')}{leaf.shape}"
    if hasattr(leaf, "detach"):
        yield from ((kind, bits) for bits in _bits_of_torch(leaf.detach()))
    elif hasattr(leaf, "__array__"):
        value = np.asarray(leaf)
        # An object's bytes are its address, which is another in each process.
        yield kind, np.array([repr(one) for one in value.ravel()]) if value.dtype.hasobject else value
    else:
        yield kind, np.empty(0)
        for part in _PARTS:
            yield from _arrays(getattr(leaf, part, None))


def _bits_of_torch(tensor: Any) -> Iterator[Array]:
    """A tensor's values as bytes: NumPy lacks some of torch's dtypes."""
    import torch

    if tensor.layout is torch.strided:
        yield tensor.cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
    else:
        held = tensor.to_sparse_coo().coalesce()
        yield from (*_bits_of_torch(held.indices()), *_bits_of_torch(held.values()))


def _given(source: Any) -> Any:
    """Returns what the user gave, where Keras has put an adapter around it."""
    inner = (getattr(source, name, None) for name in ("py_dataset", "_dataset", "_dataloader", "_generator"))
    return next((x for x in inner if x is not None), source)


class Views:
    """Compares what the processes see of one epoch's data.

    Args:
        source: what they read, for the error.
        processes: those that read it.
    """

    def __init__(self, source: Any, processes: Processes) -> None:
        self._source = type(_given(source)).__name__
        self._processes = processes
        self._count = 0

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields an epoch's batches, when they have been compared."""
        for batch in batches:
            self.check(batch)
            yield batch

    def check(self, batch: Any) -> None:
        """Raises DesyncError where the processes came to different batches. A collective, for some batches."""
        self.check_read(lambda: batch)

    def check_read(self, read: Callable[[], Any]) -> None:
        """The same of a batch that is read for it, where it is compared."""
        number, self._count = self._count, self._count + 1
        if number >= FIRST and number % EVERY:
            return
        batch = read()
        found = self._processes.of_all(digest(batch), "views of the data")
        apart = [place for place, other in enumerate(found) if other != found[0]]
        if apart:
            raise DesyncError(
                f"batch {number} of {self._source} is not the same on all processes: those at {apart} of {len(found)} "
                "see another one than the first. Each reads the whole data and takes its rows. Give shuffles and "
                "generators a seed, or give each process its own part with auto_shard_dataset=False",
                ranks=tuple(self._processes.firsts[place] for place in apart),
                collective="views of the data",
            )
