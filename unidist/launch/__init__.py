"""Starting one program in many processes, watching over them, and ending them all."""

from unidist.launch.jobs import Job, LocalProcesses
from unidist.launch.request import LaunchError, Request
from unidist.launch.run import run

__all__ = ["Job", "LaunchError", "LocalProcesses", "Request", "run"]
