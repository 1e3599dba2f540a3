"""Makes what Keras distributes on torch by itself, from 3.16 on, stand back where unidist does it.

Keras 3.16 has DistributedDataParallel and DTensors in its trainer and its variables. While unidist is in use, scripts
with keras.distribution's classes get unidist's promises, and models outside of any scope are one process's own, as with
Keras 3.15, which has none of these places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unidist.keras.patching.compat import TorchEpochIterator, TorchTrainer, Trainer, backend, torch_trainer, tree
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import context
from unidist.keras.torch.step.eagerly import is_compiled


def hooks() -> Iterator[Hook]:
    why = "unidist distributes, and not Keras beside it"
    yield Hook(backend.Variable, "_initialize_distributed", _nothing, why, versions=("3.16",))
    yield Hook(TorchTrainer, "_initialize_ddp", _nothing, why, versions=("3.16",))
    yield Hook(TorchTrainer, "_use_torch_compile", _as_compiled, why, versions=("3.16",))
    yield Hook(TorchTrainer, "train_step", _by_backward, why, versions=("3.16",))
    yield Hook(TorchTrainer, "get_metrics_result", _of_any_backend, why, versions=("3.16",))
    yield Hook(TorchEpochIterator, "_get_iterator", _whole_batches, why, versions=("3.16",))
    yield Hook(torch_trainer, "_distribute_data", _converted, why, versions=("3.16",))


def _nothing(original: Any) -> Callable[..., None]:
    return lambda self, *args: None


def _as_compiled(original: Any) -> Callable[[Any], bool]:
    """Returns whether a model is compiled, also under a distribution.

    One of unidist brings no dispatch mode, which torch.compile could not trace.
    """
    return lambda self: bool(self.jit_compile and not self.run_eagerly)


@calling
def _by_backward(original: Any, self: Any, data: Any) -> Any:
    """Makes the step of a compiled model call `backward`, so that gradients are summed over the ranks.

    With jit_compile=True Keras's would call torch.autograd.grad, unless it runs eagerly.
    """
    if context.frame() is None or self.run_eagerly or not is_compiled(self):
        return original(self, data)
    self.run_eagerly = True
    try:
        return original(self, data)
    finally:
        self.run_eagerly = False


def _of_any_backend(original: Any) -> Callable[[Any], Any]:
    """Metrics are merged by unidist (metrics.py)."""
    return lambda self: Trainer.get_metrics_result(self)


def _whole_batches(original: Any) -> Callable[[Any], Any]:
    return lambda self: self.data_adapter.get_torch_dataloader()


def _converted(original: Any) -> Callable[..., Any]:
    convert = torch_trainer.convert_to_tensor
    return lambda data, layouts=None: tree.map_structure(lambda x: None if x is None else convert(x), data)
