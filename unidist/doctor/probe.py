"""What one backend is and sees, told by a process of its own: `python -m unidist.doctor.probe BACKEND` prints JSON."""

from __future__ import annotations

import json
import sys

from unidist.backends import registry
from unidist.errors import UnidistError


def main(name: str) -> None:
    """Prints {"devices": [...]}, or {"error": what is wrong with it}."""
    try:
        adapter = registry.load(name)()
        # A world gives a process of torch one device of those that it sees.
        devices = getattr(adapter, "visible_devices", adapter.list_devices)()
    except UnidistError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps({"devices": devices}))


if __name__ == "__main__":
    main(sys.argv[1])
