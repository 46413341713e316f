"""cuvmm's wire format, docs/wire-format.md, over sockets with or without a timeout and with peers that are trusted."""

import os
import socket
import struct

HEADER = struct.Struct("<4sHHIIIi16s16sQ16sQII")
REPLY = struct.Struct("<BBHI")
MAGIC, VERSION, FILE_DESCRIPTORS, ON_DEVICE = b"CUVM", 1, 1, 1
UNASKED, IN_ONE_MESSAGE, MORE, ACCEPTED, REFUSED, OTHER = 16, 253, 1, 2, 3, 11
HOST = bytes.fromhex(open("/proc/sys/kernel/random/boot_id").read().replace("-", ""))
accept = lambda peer: peer.sendall(REPLY.pack(ACCEPTED, 0, 0, 0))


def read(peer, size, data=b""):
    while len(data) < size:
        if not (more := peer.recv(size - len(data))):
            raise EOFError("the peer closed its end")
        data += more
    return data


def receive(peer, device, take):
    """Receives a buffer of the device with that UUID, each chunk by `take(file, size)`. Returns its size. Then `accept`."""
    magic, version, _, _, kind, _, _, on, _, _, there, size, chunks, _ = header = HEADER.unpack(read(peer, HEADER.size))
    if (magic, version, kind, on, there) != (MAGIC, VERSION, FILE_DESCRIPTORS, device, HOST):
        peer.sendall(REPLY.pack(REFUSED, 0, OTHER, 0))
        raise ValueError(f"not a buffer to take here: {header}")
    sizes = iter(struct.unpack(f"<{chunks}Q", read(peer, 8 * chunks)))
    due, left = min(UNASKED, chunks), chunks
    while left:
        if due == 0:
            due = min(IN_ONE_MESSAGE, left)
            peer.sendall(REPLY.pack(MORE, 0, due, 0))
        count, fds, flags, _ = socket.recv_fds(peer, 4, IN_ONE_MESSAGE, socket.MSG_CMSG_CLOEXEC)
        said = int.from_bytes(read(peer, 4, count), "little")
        with_all = said == len(fds) and 0 < len(fds) <= due and not flags & socket.MSG_CTRUNC
        for fd in fds:
            with_all and take(fd, next(sizes))
            os.close(fd)
        if not with_all:
            raise ValueError("not as many handles as were said")
        due, left = due - len(fds), left - len(fds)
    return size


def send(peer, device, sizes, export):
    """Sends a buffer of those chunks, on the device with that UUID. `export` gives a file for the nth, to be closed."""
    length, chunks = HEADER.size + 8 * len(sizes), len(sizes)
    header = (MAGIC, VERSION, 0, length, FILE_DESCRIPTORS, ON_DEVICE, 0, device, bytes(16), 0, HOST, sum(sizes), chunks, 0)
    peer.sendall(HEADER.pack(*header) + struct.pack(f"<{chunks}Q", *sizes))
    due, sent, kind = UNASKED, 0, MORE
    while kind == MORE:
        if fds := [export(nth) for nth in range(sent, min(sent + due, chunks))]:
            socket.send_fds(peer, [len(fds).to_bytes(4, "little")], fds)
        any(os.close(fd) for fd in fds)
        sent += len(fds)
        kind, _, due, detail = REPLY.unpack(read(peer, REPLY.size))
    if kind != ACCEPTED:
        raise ValueError(f"refused for reason {due} ({detail})")
