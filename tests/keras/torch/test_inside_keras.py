"""Names from inside Keras, where its versions differ and where one is missing."""

from __future__ import annotations

import keras
import pytest

from unidist.errors import BackendMismatchError
from unidist.keras.patching import compat


def test_each_version_has_the_places_it_was_read_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {version: compat.nearest(version) for version in ("3.14.0", "3.15.1", "3.16.0.dev2026102704", "3.17.0")}
    assert found == {"3.14.0": "3.15", "3.15.1": "3.15", "3.16.0.dev2026102704": "3.16", "3.17.0": "3.16"}
    places = ("keras.ops:add", "keras.ops:subtract")
    monkeypatch.setitem(compat._MOVED, "moves", places)
    for version, operation in (("3.15.1", keras.ops.add), ("3.16.0", keras.ops.subtract)):
        monkeypatch.setattr(keras, "__version__", version)
        assert compat.moves is operation
        monkeypatch.delattr(compat, "moves")


@pytest.mark.parametrize("place", ["keras.nowhere:name", "keras.ops:nothing"])
def test_a_place_that_keras_lacks_says_which_versions_have_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat._PLACES, "gone", place)
    with pytest.raises(BackendMismatchError, match=r"Keras .* does not have: install keras 3\.15 or 3\.16") as raised:
        compat.gone()
    assert place.replace(":", ".") in str(raised.value)


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compat.nothing
