"""What cuvmm_wire.py does with peers that are slow, silent or gone. Needs no driver: any file passes for a handle."""

import os
import socket
import threading
import unittest

import cuvmm_wire as wire

DEVICE, SIZES = bytes(range(16)), [2 << 20] * 20


class Slow:
    """A socket that gives and takes a byte at a time, as any may."""

    def __init__(self, peer):
        self.peer = peer

    def recv(self, size):
        return self.peer.recv(min(size, 1))

    def recvmsg(self, size, *rest):
        return self.peer.recvmsg(min(size, 1), *rest)

    def sendall(self, data):
        for byte in data:
            self.peer.sendall(bytes([byte]))

    def sendmsg(self, *message):
        return self.peer.sendmsg(*message)


def null(_nth=0):
    return os.open("/dev/null", os.O_RDONLY)


class Wire(unittest.TestCase):
    def setUp(self):
        self.ours, self.theirs = socket.socketpair()
        self.before = len(os.listdir("/proc/self/fd"))

    def tearDown(self):
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.before)
        self.ours.close()
        self.theirs.close()

    def test_a_buffer_passes_a_byte_at_a_time_with_and_without_a_timeout(self):
        for timeout in (None, 60):
            self.ours.settimeout(timeout)
            self.theirs.settimeout(timeout)
            sender = threading.Thread(target=wire.send, args=(Slow(self.theirs), DEVICE, SIZES, null))
            sender.start()
            taken = []
            size = wire.receive(Slow(self.ours), DEVICE, lambda fd, size: taken.append((os.fstat(fd).st_rdev, size)))
            wire.accept(self.ours)
            sender.join()
            self.assertEqual(size, sum(SIZES))
            self.assertEqual(taken, [(os.stat("/dev/null").st_rdev, size) for size in SIZES])

    def test_a_silent_peer_is_waited_for_until_the_timeout(self):
        self.ours.settimeout(0.05)
        with self.assertRaises(TimeoutError):
            wire.receive(self.ours, DEVICE, self.fail)
        self.theirs.sendall(b"CU")
        with self.assertRaises(TimeoutError):
            wire.receive(self.ours, DEVICE, self.fail)
        with self.assertRaises(TimeoutError):
            wire.send(self.ours, DEVICE, SIZES, null)

    def test_a_peer_that_ends_in_the_midst_is_told_from_one_that_is_slow(self):
        self.theirs.sendall(b"CUVM")
        self.theirs.shutdown(socket.SHUT_WR)
        with self.assertRaises(EOFError):
            wire.receive(self.ours, DEVICE, self.fail)

    def test_a_buffer_of_another_device_is_refused_and_the_sender_told(self):
        sender = threading.Thread(target=self.assertRaises, args=(ValueError, wire.send, self.theirs, DEVICE, [1], null))
        sender.start()
        with self.assertRaises(ValueError):
            wire.receive(self.ours, bytes(16), self.fail)
        sender.join()


if __name__ == "__main__":
    unittest.main()
