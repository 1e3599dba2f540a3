"""Says how much the processes of a world compare of what they run."""

from __future__ import annotations

import os

from unidist.errors import CapabilityError

VARIABLE = "UNIDIST_CHECK"


def checks_all() -> bool:
    """Returns whether every collective is compared among its processes, and not only what is new.

    Raises:
        CapabilityError: UNIDIST_CHECK says neither "first" nor "all".

    Example:
        >>> import os
        >>> os.environ["UNIDIST_CHECK"] = "all"
        >>> checks_all()
        True
        >>> del os.environ["UNIDIST_CHECK"]
        >>> checks_all()
        False
    """
    said = os.environ.get(VARIABLE, "first")
    if said not in ("first", "all"):
        raise CapabilityError(f'{VARIABLE} must be "first" (what is new is compared) or "all", found {said!r}')
    return said == "all"
