"""The places where unidist steps into Keras on JAX, in the versions that were read: a change shows here first."""

from __future__ import annotations

from unidist.testing.processes import ProcessWorld

PLACES = "tests.keras.jax.interceptions"
MAKE_FUNCTION = {
    "3.15": "(self, step_function, concatenate_outputs=False)",
    "3.16": "(self, step_function, out_shardings=None, concatenate_outputs=False)",
}
DISTRIBUTE_DATA = {"3.15": "(data, layouts=None)", "3.16": "(data, layouts=None, is_super_batch=False)"}


def test_every_place_is_as_in_the_version_it_was_made_for(one: ProcessWorld) -> None:
    """`one` runs Keras without unidist's hooks."""
    found = one.call(f"{PLACES}:signatures")[0]
    version = next((version for version in found["read"] if found["version"].startswith(f"{version}.")), None)
    assert version is not None, "look at each place again, then add the version to unidist/keras/patching/compat.py"
    assert found["places"] == {
        "JaxVariable._initialize_layout": "(self)",
        "JaxVariable._direct_assign": "(self, value)",
        "JaxVariable.__array__": "(self, dtype=None)",
        "BaseOptimizer.add_variable_from_reference": "(self, reference_variable, name=None, initializer='zeros')",
        "BaseOptimizer._overwrite_model_variables_with_average_value": "(self, trainable_variables)",
        "BaseOptimizer.stateless_apply": "(self, optimizer_variables, grads, trainable_variables)",
        "Layer.stateless_call": (
            "(self, trainable_variables, non_trainable_variables, *args, return_losses=False, **kwargs)"
        ),
        "Operation.__call__": "(self, *args, **kwargs)",
        "Trainer.__init__": "(self)",
        "JAXTrainer._make_function": MAKE_FUNCTION[version],
        "JAXTrainer.jax_state_sync": "(self)",
        "conversions.convert_to_numpy": "(x)",
        "JAXEpochIterator._get_iterator": "(self)",
        "trainer._distribute_data": DISTRIBUTE_DATA[version],
        "distribution_lib.distribute_tensor": "(tensor, layout)",
        "data_adapters.get_data_adapter": (
            "(x, y=None, sample_weight=None, batch_size=None, steps_per_epoch=None, shuffle=False, class_weight=None)"
        ),
        "saving_api.save_model": "(model, filepath, overwrite=True, zipped=None, **kwargs)",
        "saving_api.save_weights": "(model, filepath, overwrite=True, max_shard_size=None, **kwargs)",
    }
    assert found["entrances"] == []
    assert found["jit is jax.jit"]
    assert found["state lengths"] == {"train": 4, "test": 3, "predict": 2}


def test_the_hooks_are_there_once_and_do_nothing_without_a_distribution(four: ProcessWorld) -> None:
    found = four.call(f"{PLACES}:after_install")[0]
    assert found["again"]
    assert found["devices"] == 1
    assert found["sent"] == 0


def test_another_keras_is_refused_with_words(four: ProcessWorld) -> None:
    text = four.call(f"{PLACES}:missing")[0]
    assert "Trainer._no_such_method" in text
    assert "install keras 3.15 or 3.16" in text
