"""Shares GPU memory with a program that uses cuvmm, over the Unix stream socket that is its standard input: `share.py
receive` imports a buffer and turns over each of its bits, `share.py send` sends one and demands that back.

It has no part of cuvmm: cuvmm_wire.py is all that the wire format takes, and NVIDIA's own bindings do the rest.
"""

import socket
import sys

from cuda.bindings import driver

import cuvmm_wire as wire

KIND = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
TURNED_OVER = bytes(range(255, -1, -1))


def check(answer):
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {code!r}")
    return values[0] if values else None


def map_all(chunks):
    """Maps chunks, each a handle and a size, one behind the other. The mappings alone keep the memory."""
    whole = sum(size for _, size in chunks)
    start = end = int(check(driver.cuMemAddressReserve(whole, 0, 0, 0)))
    for memory, size in chunks:
        check(driver.cuMemMap(end, size, 0, memory, 0))
        check(driver.cuMemRelease(memory))
        end += size
    access = driver.CUmemAccessDesc()
    access.location.type, access.location.id = DEVICE, 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(driver.cuMemSetAccess(start, whole, [access], 1))
    return start, whole


def read(address, size):
    data = bytearray(size)
    check(driver.cuMemcpyDtoH(data, address, size))
    return bytes(data)


def write(address, data):
    check(driver.cuMemcpyHtoD(address, data, len(data)))
    # It may still be on its way, and another process is to see it.
    check(driver.cuCtxSynchronize())


def receive(peer, device):
    chunks = []
    take = lambda fd, size: chunks.append((check(driver.cuMemImportFromShareableHandle(fd, KIND)), size))
    size = wire.receive(peer, device, take)
    address, whole = map_all(chunks)
    wire.accept(peer)
    write(address, read(address, size).translate(TURNED_OVER))
    # Ours, behind the exchange: that the bytes are there.
    peer.sendall(b"!")
    return address, whole


def send(peer, device):
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type, wanted.location.id, wanted.requestedHandleTypes = DEVICE, 0, KIND
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = check(driver.cuMemGetAllocationGranularity(wanted, minimum))
    # More than come unasked.
    sizes = [granularity] * 18 + [3 * granularity]
    chunks = [(check(driver.cuMemCreate(size, wanted, 0)), size) for size in sizes]
    export = lambda nth: int(check(driver.cuMemExportToShareableHandle(chunks[nth][0], KIND, 0)))
    files = [export(nth) for nth in range(len(chunks))]
    address, size = map_all(chunks)
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    write(address, data)
    wire.send(peer, device, sizes, files.__getitem__)
    if peer.recv(1) != b"!" or read(address, size) != data.translate(TURNED_OVER):
        raise RuntimeError("the other process did not turn over what it had")
    return address, size


if __name__ == "__main__":
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
    device = bytes(check(driver.cuDeviceGetUuid(0)).bytes)
    with socket.socket(fileno=0) as peer:
        address, size = {"receive": receive, "send": send}[sys.argv[1]](peer, device)
    check(driver.cuMemUnmap(address, size))
    check(driver.cuMemAddressFree(address, size))
    check(driver.cuDevicePrimaryCtxRelease(0))
