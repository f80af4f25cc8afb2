"""Frames between two processes: what comes is what was sent, or refused; nothing that is too large is sent or read."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from fx_quant_conformance.conformance.machine import frames
from fx_quant_conformance.conformance.machine.frames import (
    MOST_BYTES,
    Frame,
    NoAnswer,
    WireError,
    receive_frame,
    send_frame,
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        yield ours, theirs


def test_a_frame_arrives_as_it_was_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    send_frame(theirs, Frame(head={"a": [1, "ä"]}, pieces=[b"", b"xyz"]))
    frame = receive_frame(ours)
    assert (
        frame is not None and frame.head == {"a": [1, "ä"]} and [bytes(each) for each in frame.pieces] == [b"", b"xyz"]
    )


def test_the_end_is_no_frame(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(b"\0\0")
    theirs.close()
    assert receive_frame(ours) is None


@pytest.mark.timeout(20)
def test_a_frame_that_comes_byte_by_byte_ends_at_the_limit(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends

    def trickle() -> None:
        theirs.sendall(struct.pack(">IQ", 1 << 20, 0))
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(b" ")
                time.sleep(0.05)

    threading.Thread(target=trickle, daemon=True).start()
    with pytest.raises(TimeoutError):
        receive_frame(ours, time.monotonic() + 0.2)


@pytest.mark.parametrize(
    ("head", "data"),
    [
        (b"not json", b""),
        (b"[]", b""),
        (b'{"sizes": [3]}', b"x"),
        (b'{"sizes": [-1, 2]}', b"x"),
        (b'{"sizes": "x"}', b"x"),
        (b"[" * 100_000, b""),
    ],
)
def test_what_is_no_frame_is_said(ends: tuple[socket.socket, socket.socket], head: bytes, data: bytes) -> None:
    ours, theirs = ends
    theirs.sendall(struct.pack(">IQ", len(head), len(data)) + head + data)
    with pytest.raises(WireError, match="a message that cannot be read"):
        receive_frame(ours)


def test_a_frame_that_says_it_is_huge_is_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(struct.pack(">IQ", 2, MOST_BYTES))
    with pytest.raises(WireError, match="at most"):
        receive_frame(ours)


def test_a_frame_that_is_too_large_is_not_sent(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(frames, "MOST_BYTES", 100)
    with pytest.raises(NoAnswer, match=r"a message of 1[0-9]{2} bytes, .*; at most 100 are sent"):
        send_frame(theirs, Frame(head={}, pieces=[b"x" * 60, b"y" * 60]))
    send_frame(theirs, Frame(head={}, pieces=[b"x" * 60]))
    frame = receive_frame(ours)
    assert frame is not None and bytes(frame.pieces[0]) == b"x" * 60, "of the other nothing has come"
