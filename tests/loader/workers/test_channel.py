"""The connection between ``DataLoader`` and a worker process."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from aiofeed.loader.workers.channel import Channel, wait
from tests.support.interrupts import Interrupt


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def receive(channel: Channel, n: int) -> list[bytes]:
    while len(channel.messages) < n and not channel.ended:
        wait([channel], 30.0)
    return [channel.messages.popleft()[0] for _ in range(n)]


def test_messages_arrive_in_order() -> None:
    """Messages of all sizes arrive as they were sent, in order."""
    one, other = pair()
    messages = [b"", b"a", b"b" * 100_000, b"c"]
    for message in messages:
        one.send(message)
    while one.unsent or len(other.messages) < 4:
        wait([one, other], 30.0)
    assert [payload for payload, _ in other.messages] == messages
    one.close()
    other.close()


def test_large_messages_both_ways_at_once() -> None:
    """Two processes that send each other more than the socket has room for do not wait for each other."""
    one, other = pair()
    large = os.urandom(8 << 20)
    got: list[bytes] = []

    def work() -> None:
        other.send(large)
        got.extend(receive(other, 2))
        while other.unsent:
            wait([other], 30.0)

    thread = threading.Thread(target=work)
    thread.start()
    for message in (large, b"small"):
        one.send(message)
    assert receive(one, 1) == [large]
    while one.unsent:
        wait([one], 30.0)
    thread.join(60)
    assert got == [large, b"small"]
    one.close()
    other.close()


def test_send_never_blocks() -> None:
    """A message that the peer has no room for is sent by later waits."""
    one, other = pair()
    for _ in range(20):
        one.send(b"x" * 1_000_000)
    assert one.unsent
    one.close()
    assert not one.unsent
    other.close()


def test_descriptors() -> None:
    """Descriptors arrive with their message, and are closed with a channel that nobody reads."""
    one, other = pair()
    for text in (b"one", b"two"):
        reading, writing = os.pipe()
        os.write(writing, text)
        os.close(writing)
        one.send(text, [reading])
    while len(other.messages) < 2:
        wait([other], 30.0)
    payload, (descriptor,) = other.messages.popleft()
    assert os.read(descriptor, 9) == payload == b"one"
    os.close(descriptor)
    one.close()
    other.close()


def test_the_end_of_the_peer() -> None:
    """Messages that were sent before the peer has ended still arrive."""
    one, other = pair()
    one.send(b"last")
    one.close()
    while not other.ended:
        wait([other], 30.0)
    assert receive(other, 1) == [b"last"]
    other.send(b"nobody reads this")
    assert not other.unsent
    other.close()
    other.close()


def test_ctrl_c_loses_no_message_in_an_open_channel() -> None:
    """After Ctrl-C at any place the channel has all messages, or is closed."""
    place, closed = 0, 0
    while True:
        one, other = pair()
        one.send(b"first")
        interrupt = Interrupt(place)
        try:
            with interrupt:
                wait([other], 30.0)
        except KeyboardInterrupt:
            closed += other.ended
            one.send(b"second")
            if not other.ended:
                assert receive(other, 2) == [b"first", b"second"]
        one.close()
        other.close()
        if interrupt.left > 0:
            break
        place += 1
    assert place > 5
    assert closed


def test_a_timeout() -> None:
    one, other = pair()
    wait([one, other], 0.0)
    assert not one.messages
    one.close()
    wait([one], 0.0)
    other.close()
    with pytest.raises(OSError, match=r"closed|Bad file"):
        other._sock.recv(1)
