"""unidist over sockets: what the adapter is. Imports no framework."""

from unidist.backends.environment import Launcher
from unidist.backends.registry import Entry

ENTRY = Entry(
    target="unidist_sockets.backend:SocketsBackend",
    requires=("torch",),
    keras_backends=("torch",),
    launcher=Launcher(name="sockets", count="SOCKETS_COUNT", index="SOCKETS_INDEX", address=("SOCKETS_ADDRESS",)),
    job="unidist.launch:LocalProcesses",
)
