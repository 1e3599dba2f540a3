"""What a program does with a model on TensorFlow between its trainings: variables beside arrays, and a loop of its own.

What each function returns has to be one device's.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import numpy as np

from tests.parity.interplay import _data, _grid, _model

_WITH_ARRAY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "gt", "le", "eq", "ne")
_OF_ARRAY = ("add", "sub", "mul", "pow")


def between_trainings(is_distributed: bool) -> dict[str, Any]:
    """Operators and functions of a variable that is cut and of an array; the variables' values after they were set; and
    a loop that goes on with them."""
    model, kernel = _trained(is_distributed)
    return {**_beside_arrays(model, kernel), **_loop_of_ones_own(model, kernel)}


def _beside_arrays(model: Any, kernel: Any) -> dict[str, Any]:
    from keras import ops

    x, _ = _data()
    array = np.linspace(1.0, 2.0, 16 * 8, dtype="float32").reshape(16, 8)
    found = {name: getattr(operator, name)(kernel, array) for name in _WITH_ARRAY}
    found |= {f"r{name}": getattr(operator, name)(ops.convert_to_tensor(array), kernel) for name in _OF_ARRAY}
    found |= {
        "matmul": kernel @ array.T,
        "of itself": kernel * kernel - kernel,
        "negative": -kernel - array,
        "absolute": abs(kernel) - array,
        "slice": kernel[:4, 1:3] - array[:4, 1:3],
        "row": kernel[0] - array[0],
        "ops": ops.subtract(array, kernel),
        "chosen": ops.where(kernel > 0, kernel, array),
        "joined": ops.concatenate([kernel, array]),
        "product": ops.einsum("ij,jk->ik", x, kernel),
        "a layer": model.layers[1](x),
        "two layers": model.layers[2](model.layers[1](x)),
    }
    kernel.assign(0.9 * kernel + 0.1 * array)
    kernel.assign_add(array)
    kernel.assign_sub(0.5 * array)
    slot = next(v for v in model.optimizer.variables if v.path.endswith("kernel_momentum"))
    slot.assign_add(np.ones(slot.shape, "float32"))
    found |= {"kernel": kernel, "slot": slot, "of the model": model(x)}
    return {name: ops.convert_to_numpy(value) for name, value in found.items()}


def _loop_of_ones_own(model: Any, kernel: Any) -> dict[str, Any]:
    """Layers are called one by one, and the kernel is held near to what it was."""
    import tensorflow as tf
    from keras import ops

    x, y = _data()
    before, losses = np.array(kernel), []
    for _ in range(3):
        with tf.GradientTape() as tape:
            hidden = model.layers[1](x)
            fit = ops.mean(ops.sparse_categorical_crossentropy(y, model.layers[2](hidden), from_logits=True))
            loss = fit + 0.1 * ops.sum(ops.square(kernel - before))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss))
    return {"losses": np.array(losses), **{v.path: np.array(v) for v in model.variables}}


def swapped_averages(is_distributed: bool) -> dict[str, Any]:
    """A callback that swaps weights with their averages by variables of TensorFlow's, before one that restores them."""
    import keras

    model, kernel = _trained(is_distributed, keras.optimizers.Lamb(0.01, use_ema=True, ema_momentum=0.9))
    x, y = _data()
    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, restore_best_weights=True),
    ]
    history = model.fit(x, y, 16, epochs=3, verbose=0, shuffle=False, validation_data=(x, y), callbacks=callbacks)
    kernel.value.assign_add(0.5 * kernel.value - kernel.value / (kernel.value * kernel.value + 1.0))
    return {**history.history, **{v.path: np.array(v) for v in (*model.variables, *model.optimizer.variables)}}


def _trained(is_distributed: bool, optimizer: Any = "adam") -> tuple[Any, Any]:
    """The model, and its kernel that the mesh cuts."""
    import unidist

    strategy = _grid() if is_distributed else None
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = _model(optimizer)
    model.fit(*_data(), batch_size=16, verbose=0)
    if is_distributed:
        assert "up/kernel" in {row.path for row in unidist.describe(model).sharded}
    return model, model.get_layer("up").kernel
