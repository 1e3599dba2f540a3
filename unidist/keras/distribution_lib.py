"""Answers what Keras's distribution API asks of any backend, by the backend in use."""

from __future__ import annotations

from unidist import session


def list_devices(device_type: str | None = None) -> list[str]:
    return session.list_devices(device_type.lower() if device_type else None)


def get_device_count(device_type: str | None = None) -> int:
    return len(list_devices(device_type))


def initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
    address = job_addresses.split(",")[0] if job_addresses else None
    session.initialize(address, num_processes, process_id)


def num_processes() -> int:
    return session.process_count()


def process_id() -> int:
    return session.process_index()
