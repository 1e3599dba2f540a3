"""The typed errors of unidist: each says what was asked, what was found and what to do."""

from __future__ import annotations


class UnidistError(Exception):
    """Base of every error that unidist raises on purpose.

    Example:
        >>> import unidist
        >>> issubclass(unidist.MeshError, unidist.UnidistError)
        True
    """


class BackendNotAvailableError(UnidistError, ImportError):
    """A backend was asked for that is unknown, not installed, or has no devices or launcher here.

    Example:
        >>> import unidist
        >>> unidist.use("mpi")
        Traceback (most recent call last):
        unidist.errors.BackendNotAvailableError: unknown backend 'mpi': ...
    """


class BackendMismatchError(UnidistError, RuntimeError):
    """The backend asked for and the Keras backend (or a world already joined) contradict each other.

    Example:
        >>> import unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> unidist.initialize()
        >>> unidist.initialize()
        Traceback (most recent call last):
        unidist.errors.BackendMismatchError: initialize was called a second time: ...
    """


class MeshError(UnidistError, ValueError):
    """A mesh that cannot be: sizes, names or devices do not fit each other or the world.

    Example:
        >>> import unidist
        >>> unidist.Mesh({"data": 0})
        Traceback (most recent call last):
        unidist.errors.MeshError: ...
    """


class LayoutError(UnidistError, ValueError):
    """A layout that cannot be: an unknown axis, an axis used twice, a rule that matches nothing.

    Example:
        >>> import unidist
        >>> unidist.Layout("data", "data")
        Traceback (most recent call last):
        unidist.errors.LayoutError: axis 'data' is used twice in ('data', 'data'), ...
    """


class ArgumentError(UnidistError, ValueError):
    """An argument has a value that means nothing there.

    Example:
        >>> import unidist
        >>> unidist.Telemetry("logs", every=0)
        Traceback (most recent call last):
        unidist.errors.ArgumentError: every=0: give a number of steps, 1 or more
    """


class CapabilityError(UnidistError, NotImplementedError):
    """The backend declares that it cannot do what was asked.

    Example:
        >>> import unidist
        >>> unidist.use("sim", speed="fast")
        Traceback (most recent call last):
        unidist.errors.CapabilityError: use('sim') has no option speed; ...
    """


class DesyncError(UnidistError, RuntimeError):
    """The ranks disagree: a collective, shape or dtype differs, or a rank did not come.

    Attributes:
        ranks: the ranks concerned, in order.
        collective: the collective at which they parted, or ``None``.
        variable: the variable it was for, or ``None``.

    Example:
        >>> import unidist
        >>> error = unidist.DesyncError("rank 1 did not come", ranks=(1,), collective="all_reduce")
        >>> error.ranks, error.collective
        ((1,), 'all_reduce')
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
    """Another process of the world ended or stopped answering while this one waited for it.

    Example:
        >>> import unidist
        >>> issubclass(unidist.ProcessLostError, RuntimeError)
        True
    """


class CheckpointError(UnidistError, OSError):
    """A checkpoint that cannot be written, or is not what was written: a file is missing, cut or damaged.

    Attributes:
        file: the file concerned, or "".
        tensor: the tensor concerned, or "".

    Example:
        >>> import unidist
        >>> error = unidist.CheckpointError("model-00001-of-00001.safetensors: ...", tensor="dense/kernel")
        >>> isinstance(error, OSError), error.tensor
        (True, 'dense/kernel')
    """

    def __init__(self, message: str, *, file: str = "", tensor: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class DrawingError(UnidistError, ValueError):
    """Something that no picture can be made of, or a file that no picture is saved to.

    Example:
        >>> import unidist
        >>> unidist.draw(3)
        Traceback (most recent call last):
        unidist.errors.DrawingError: draw of int: give an array, ...
    """


class RankFailedError(UnidistError, RuntimeError):
    """A function that `notebook_run` runs failed in a process, or its processes ended or took too long.

    Attributes:
        rank: the process that failed first; None where none of them said so.
        kind: the name of its exception's type; "timeout" or "ended" where there was none.
        trace: its traceback as text, or "".

    Example:
        >>> import unidist
        >>> error = unidist.RankFailedError("rank 1 of 2: ValueError: no", rank=1, kind="ValueError")
        >>> error.rank, error.kind
        (1, 'ValueError')
    """

    def __init__(self, message: str, *, rank: int | None = None, kind: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.trace = trace
