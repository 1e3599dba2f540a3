"""Knowledge distillation: a small model learns from the labels and from what a large one says."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS, BATCH, WIDTH, KINDS = 16, 8, 6, 3


def network(width: int, name: str) -> Any:
    return keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.Dense(width, name="a"),
            layers.BatchNormalization(epsilon=0.1, name="norm"),
            layers.ReLU(),
            layers.Dense(KINDS, name="b"),
        ],
        name=name,
    )


class Distiller(keras.Model):
    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__(name="distiller")
        self.teacher, self.student = teacher, student
        self.teacher.trainable = False

    def compile(self, optimizer: Any, metrics: Any, by_labels: Any, by_teacher: Any) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.by_labels, self.by_teacher = by_labels, by_teacher

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, allow_empty: bool = False
    ) -> Any:
        said = self.teacher(x, training=False)
        soft = self.by_teacher(ops.softmax(said / 3.0, axis=1), ops.softmax(y_pred / 3.0, axis=1)) * 9.0
        return 0.3 * self.by_labels(y, y_pred) + 0.7 * soft

    def call(self, x: Any) -> Any:
        return self.student(x)


def run(steps: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(ROWS, WIDTH)).astype("float32"), rng.integers(0, KINDS, ROWS).astype("int32")
    by_labels = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher = network(16, "teacher")
    teacher.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), by_labels)
    taught = teacher.fit(x, y, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history["loss"]
    distiller = Distiller(network(4, "student"), teacher)
    distiller.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        [keras.metrics.SparseCategoricalAccuracy()],
        by_labels,
        keras.losses.KLDivergence(),
    )
    history = distiller.fit(x, y, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history
    scores = distiller.evaluate(x, y, batch_size=BATCH, verbose=0)
    alone = network(4, "alone")
    alone.set_weights(distiller.student.get_weights())
    return {
        "taught": taught,
        **history,
        "scores": scores,
        "copied": alone.predict(x, verbose=0),
        "weights": distiller.get_weights(),
    }
