"""`unidist doctor`: what is wrong with this machine or cluster, before or after a job hangs."""

from unidist.doctor.check import Check
from unidist.doctor.report import as_json, as_text
from unidist.doctor.world import Examination, examine, request

__all__ = ["Check", "Examination", "as_json", "as_text", "examine", "request"]
