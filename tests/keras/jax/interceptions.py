"""What the processes of test_interception run."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import keras
import numpy as np

import unidist
from tests.support.clearing import cleared
from unidist.errors import BackendMismatchError
from unidist.keras.patching.compat import (
    READ,
    BaseOptimizer,
    JAXTrainer,
    JaxVariable,
    Layer,
    Operation,
    Trainer,
    conversions,
    data_adapters,
    saving_api,
)
from unidist.keras.patching.compat import jax_distribution_lib as distribution_lib
from unidist.keras.patching.compat import jax_trainer as trainer

ENTRANCES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
PLACES: dict[str, Any] = {
    "JaxVariable": (JaxVariable, ("_initialize_layout", "_direct_assign", "__array__")),
    "BaseOptimizer": (
        BaseOptimizer,
        ("add_variable_from_reference", "_overwrite_model_variables_with_average_value", "stateless_apply"),
    ),
    "Layer": (Layer, ("stateless_call",)),
    "Operation": (Operation, ("__call__",)),
    "Trainer": (Trainer, ("__init__",)),
    "JAXTrainer": (JAXTrainer, ("_make_function", "jax_state_sync")),
    "conversions": (conversions, ("convert_to_numpy",)),
    "JAXEpochIterator": (trainer.JAXEpochIterator, ("_get_iterator",)),
    "trainer": (trainer, ("_distribute_data",)),
    "distribution_lib": (distribution_lib, ("distribute_tensor",)),
    "data_adapters": (data_adapters, ("get_data_adapter",)),
    "saving_api": (saving_api, ("save_model", "save_weights")),
}


def signatures() -> dict[str, Any]:
    places = {
        f"{owner}.{name}": str(inspect.signature(getattr(where, name)))
        for owner, (where, names) in PLACES.items()
        for name in names
    }
    steps = {
        "train": inspect.getsource(JAXTrainer.train_step),
        "test": inspect.getsource(JAXTrainer.test_step),
        "predict": inspect.getsource(JAXTrainer.predict_step),
    }
    return {
        "version": keras.__version__,
        "read": READ,
        "places": places,
        "entrances": [name for name in ENTRANCES if name not in vars(JAXTrainer)],
        "jit is jax.jit": trainer.jit is jax.jit,
        "state lengths": {
            name: source.partition(") = state")[0].rpartition("(")[2].count("variables")
            if ") = state" in source
            else source.partition(" = state")[0].rpartition("\n")[2].count("variables")
            for name, source in steps.items()
        },
    }


def after_install() -> dict[str, Any]:
    from unidist.keras import hooks

    before = JAXTrainer.fit
    hooks.install()
    again = JAXTrainer.fit is before
    cleared()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with unidist.ledger() as book:
        model.fit(np.ones((5, 3)), np.ones((5, 2)), batch_size=2, verbose=0)
        model.predict(np.ones((5, 3)), verbose=0)
    devices = {device for v in model.variables for device in v.value.devices()}
    return {"again": again, "devices": len(devices), "sent": book.count()}


def missing() -> str:
    from unidist.keras.patching.patches import Hook, Table

    try:
        Table([Hook(JAXTrainer, "_no_such_method", lambda original: original, "a test")]).turn_on()
    except BackendMismatchError as error:
        return str(error)
    return "accepted"
