"""What the processes of these tests do."""

from __future__ import annotations

from typing import Any

from tests.planner import zoo

STEPS = 5


def start(devices: int | None) -> None:
    """A process of one device (None), or with virtual ones."""
    import warnings

    if devices is not None:
        import unidist

        unidist.use("sim", devices=devices)
    import keras

    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword", DeprecationWarning)
    keras.utils.disable_interactive_logging()


def train(name: str, mesh: dict[str, int] | None, in_scope: bool = False) -> dict[str, Any]:
    """Outputs before training, losses and weights after STEPS steps of AdamW, and what was sharded and sent.

    Args:
        mesh: None: plain Keras on one device.
        in_scope: the model is made inside the strategy's scope, else it is made before and parallelized.
    """
    import contextlib

    import keras

    import unidist

    strategy = unidist.ModelParallel(unidist.Mesh(mesh)) if mesh is not None else None
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy is not None and in_scope else contextlib.nullcontext():
        model = _trainer(name)
    if strategy is not None and not in_scope:
        unidist.parallelize(model, strategy)
    x, y = zoo.batch(model), _targets(model)
    outputs = model.predict(x, batch_size=8, verbose=0)
    with unidist.ledger() as traffic:
        history = model.fit(x, y, batch_size=8, epochs=STEPS, verbose=0, shuffle=False)
    rows = unidist.describe(model).rows if strategy is not None else ()
    weights = [(v.path, keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    return {
        "outputs": outputs,
        "losses": history.history["loss"],
        "weights": weights,
        "layouts": {row.path: str(row.layout) for row in rows if row.is_sharded},
        "planned": {} if strategy is None else {path: str(x) for path, x in strategy.layout_map.items()},
        "sent": traffic.count(),
    }


def _trainer(name: str) -> Any:
    """The backbone with a head on its first output, compiled."""
    import keras

    # One block: what is compiled twice, here and for one device, is most of the time.
    backbone = zoo.backbone(name, num_layers=1)
    outputs = backbone.output
    features = keras.tree.flatten(outputs)[0]
    head = keras.layers.Dense(4, name="head")(features)
    model = keras.Model(backbone.inputs, head)
    model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-3), "mse")
    return model


def _targets(model: Any) -> Any:
    import numpy as np

    x = zoo.batch(model)
    shape = model.compute_output_shape({name: value.shape for name, value in x.items()})
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def experts(mesh: dict[str, int]) -> dict[str, Any]:
    """Bytes that a plan says of a step of a model with experts, and that the compiled step sends."""
    import numpy as np

    import unidist
    from tests.keras.experts import BATCH, LENGTH, net

    model = unidist.parallelize(net(), unidist.ModelParallel(unidist.Mesh(mesh)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    x = np.ones((BATCH, LENGTH), "int32")
    with unidist.ledger() as traffic:
        model.train_on_batch(x, x)
    plan = unidist.plan(model, unidist.Mesh(mesh), batch=BATCH, sequence=LENGTH)
    return {
        "sent": float(traffic.bytes()),
        "planned": float(plan.predicted.bytes()),
        "of experts": [(e.op, float(e.bytes)) for e in plan.predicted.events if "bank" in e.purpose],
    }
