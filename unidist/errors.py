"""The typed errors of unidist: each says what was asked, what was found and what to do."""

from __future__ import annotations


class UnidistError(Exception):
    """Base of every error that unidist raises on purpose."""


class BackendNotAvailableError(UnidistError, ImportError):
    """A backend was asked for that is unknown, not installed, or has no devices or launcher here."""


class BackendMismatchError(UnidistError, RuntimeError):
    """The backend asked for and the Keras backend (or a world already joined) contradict each other."""


class MeshError(UnidistError, ValueError):
    """A mesh that cannot be: sizes, names or devices do not fit each other or the world."""


class LayoutError(UnidistError, ValueError):
    """A layout that cannot be: an unknown axis, an axis used twice, a rule that matches nothing."""


class CapabilityError(UnidistError, NotImplementedError):
    """The backend declares that it cannot do what was asked."""


class DesyncError(UnidistError, RuntimeError):
    """The ranks disagree: a collective, shape or dtype differs, or a rank did not come.

    Attributes:
        ranks: the ranks concerned, in order.
        collective: the collective at which they parted, or ``None``.
        variable: the variable it was for, or ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        collective: str | None = None,
        variable: str | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.collective = collective
        self.variable = variable


class ProcessLostError(UnidistError, RuntimeError):
    """Another process of the world ended or stopped answering while this one waited for it."""
