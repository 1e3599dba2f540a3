"""Prints what one backend is and sees, as JSON: `python -m unidist.keras.backend_probe BACKEND`.

It says what Keras is to the backend too.

`unidist doctor` asks it, in a process of its own for each backend.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from typing import Any

from unidist import session
from unidist.backends import registry
from unidist.errors import UnidistError


def main(name: str) -> None:
    """Prints {"devices": [...], "keras": {...}}, or {"error": what is wrong with the backend}."""
    try:
        adapter = registry.load(name)()
        devices = adapter.visible_devices()
    except UnidistError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps({"devices": devices, "keras": _keras(name)}))


def _keras(name: str) -> dict[str, Any]:
    """Returns the attributes of Keras that unidist replaces; {"error": text}; or nothing without Keras.

    They are {"replaced": their number, "lost": those that it could not replace, in words}.
    """
    if importlib.util.find_spec("keras") is None:
        return {}
    try:
        session.use(name)
        importlib.import_module("keras")  # its end brings the hooks
        from unidist.keras import hooks
        from unidist.keras.patching import patches
    except (UnidistError, ImportError) as error:
        return {"error": str(error)}
    return {"replaced": len(hooks.replaced()), "lost": list(map(str, patches.lost()))}


if __name__ == "__main__":
    main(sys.argv[1])
