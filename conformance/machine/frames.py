"""Frames: how two processes talk. A frame is a JSON object and pieces of bytes.

It is read without running anything that it names: whatever process sent it, it is numbers and text.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_HEAD = struct.Struct(">IQ")
MOST_BYTES = 1 << 30
"""Maximal number of bytes of a frame: no output of a case comes near it."""


class WireError(Exception):
    """What came over the wire is no frame, or not what was asked for."""


class NoAnswer(Exception):
    """Nobody was asked, or what was asked or answered cannot be sent or read: no fault of the backend, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message."""

    head: dict[str, Any]
    """Plain data."""
    pieces: Sequence[bytes | memoryview] = field(default=())
    """Bytes that ``head`` refers to by number."""


def send_frame(channel: socket.socket, frame: Frame) -> None:
    """Send a frame. Raises OSError if the other end is gone, NoAnswer for what that would not read."""
    sizes = [len(piece) for piece in frame.pieces]
    text = json.dumps({**frame.head, "sizes": sizes}).encode()
    if (size := len(text) + sum(sizes)) > MOST_BYTES:
        raise NoAnswer(f"a message of {size} bytes, to the backend's process or from it; at most {MOST_BYTES} are sent")
    channel.sendall(b"".join([_HEAD.pack(len(text), sum(sizes)), text, *frame.pieces]))


def receive_frame(channel: socket.socket, deadline: float = math.inf) -> Frame | None:
    """Return the next frame; None at the end. Raises WireError for what is none, TimeoutError at the deadline."""
    start = _receive(channel, _HEAD.size, deadline)
    if start is None:
        return None
    length, rest = _HEAD.unpack(start)
    if length + rest > MOST_BYTES:
        raise WireError(f"a message of {length + rest} bytes; at most {MOST_BYTES} are read")
    text, data = _receive(channel, length, deadline), _receive(channel, rest, deadline)
    if text is None or data is None:
        return None
    try:
        head = json.loads(text)
        sizes = head.pop("sizes")
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        if any(size < 0 for size in sizes) or (ends or [0])[-1] != len(data):
            raise ValueError("its pieces are not as long as it says")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"a message that cannot be read: {type(error).__name__}: {error}") from error
    view = memoryview(data)
    return Frame(head=head, pieces=[view[end - size : end] for end, size in zip(ends, sizes, strict=True)])


def _receive(channel: socket.socket, size: int, deadline: float) -> bytearray | None:
    """Return that many bytes; None if the other end closes before."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(None if left == math.inf else left)
        count = channel.recv_into(view[got:])
        if not count:
            return None
        got += count
    return data
