"""A slow cable: frames between two interfaces, each a while later. For root; run by path in their network namespace.

    python .../slow.py ONE OTHER SECONDS

This kernel may have no netem. Frames are read and sent by packet sockets, as a bridge in user space would.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import select
import socket
import struct
import sys
import time

_ALL, _OUTGOING = 0x0003, 4
_IOCTL = 0x8946
# What a driver leaves to hardware that is not there: ethtool's commands to set TX checksums, TSO, GSO and GRO.
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)
_LONGEST = 1 << 17


def exact(interface: str) -> None:
    """Frames on this interface are as they would be on a wire: of its MTU, and with checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(control, _IOCTL, struct.pack("16sP", interface.encode(), ctypes.addressof(value)))


def forward(one: str, other: str, seconds: float) -> None:
    sockets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) for _ in range(2)]
    for opened, interface in zip(sockets, (one, other), strict=True):
        opened.bind((interface, 0))
        opened.setblocking(False)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    numbers = itertools.count()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for source in select.select(sockets, [], [], wait)[0]:
            frame, address = source.recvfrom(_LONGEST)
            if address[2] != _OUTGOING:
                target = sockets[1 - sockets.index(source)]
                heapq.heappush(under_way, (time.monotonic() + seconds, next(numbers), target, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(under_way)
            # A full queue loses frames, as switches do.
            with contextlib.suppress(OSError):
                target.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "exact":
        exact(sys.argv[2])
    else:
        forward(sys.argv[1], sys.argv[2], float(sys.argv[3]))
