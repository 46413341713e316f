"""The whole round trip of CUDA's virtual memory through NVIDIA's own bindings for Python.

It runs on whatever `libcuda.so.1` the system finds: a real driver, or the stand-in of cuvmm-sim-libcuda. A line is
printed for each step, and `ok` at the end; any call that fails ends it with an error.

The second process is this script again, told by `--importer` the number of its end of the socket.
"""

import os
import socket
import subprocess
import sys

from cuda.bindings import driver

KIND = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# About the size of an allocation.
WANTED = 8 << 20


def check(answer):
    """The values of a call that succeeded."""
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {code!r}")
    return values[0] if len(values) == 1 else tuple(values)


def refused(answer, expected):
    """Makes sure that a call failed in the expected way."""
    if answer[0] != expected:
        raise RuntimeError(f"the driver answered {answer[0]!r} instead of {expected!r}")


def step(text):
    print(text, flush=True)


def start():
    """Starts the driver with the first device's context current; returns the device and its name."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    name = check(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    return device, name.strip()


def properties():
    """Shareable memory of the first device."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = KIND
    return properties


def map_at(address, size, memory):
    """Maps memory at an address, for the first device to read and write."""
    check(driver.cuMemMap(address, size, 0, memory, 0))
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(driver.cuMemSetAccess(address, size, [access], 1))


def write(address, data):
    check(driver.cuMemcpyHtoD(address, data, len(data)))
    # The copy may still be on its way from a buffer of the driver's, and another process is to see it.
    check(driver.cuCtxSynchronize())


def read(address, size):
    data = bytearray(size)
    check(driver.cuMemcpyDtoH(data, address, size))
    return bytes(data)


def expect(found, expected, what):
    if found != expected:
        raise RuntimeError(f"{what}: {found[:16].hex()}… instead of {expected[:16].hex()}…")


def pattern(size, seed):
    return bytes((index + seed) % 251 for index in range(251)) * (size // 251) + bytes(size % 251)


def exporter():
    device, name = start()
    step(f"device: {name}, driver {check(driver.cuDriverGetVersion())}")

    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = check(driver.cuMemGetAllocationGranularity(properties(), minimum))
    size = max(granularity, WANTED // granularity * granularity)
    step(f"granularity: {granularity} bytes; each allocation: {size}")

    # More than the first allocation takes, so that there is room to grow.
    address = check(driver.cuMemAddressReserve(2 * size, 0, 0, 0))
    behind = int(address) + size
    step(f"reserved: {2 * size} bytes at {int(address):#x}")

    first = check(driver.cuMemCreate(size, properties(), 0))
    refused(driver.cuMemcpyHtoD(address, b"none", 4), driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    map_at(address, size, first)
    step("created and mapped: the first allocation")

    check(driver.cuMemsetD8(address, 0x5A, size))
    expect(read(address, size), b"\x5a" * size, "after a set")
    write(address, pattern(size, 1))
    expect(read(address, size), pattern(size, 1), "after a copy")
    step("set and copied, both ways")

    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, "--importer", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as peer:
        theirs.close()
        descriptor = int(check(driver.cuMemExportToShareableHandle(first, KIND, 0)))
        socket.send_fds(ours, [size.to_bytes(8, "little")], [descriptor])
        os.close(descriptor)
        step("exported: a descriptor, sent to another process")
        # The other process ends its part with one byte.
        if ours.recv(1) != b"!":
            raise RuntimeError("the other process went away")
    if peer.returncode != 0:
        raise RuntimeError(f"the other process failed: {peer.returncode}")
    expect(read(address, size), pattern(size, 2), "after the other process wrote")
    step("read what the other process wrote")

    second = check(driver.cuMemCreate(size, properties(), 0))
    map_at(behind, size, second)
    check(driver.cuMemcpyDtoD(behind, address, size))
    expect(read(address, 2 * size), pattern(size, 2) * 2, "after the range grew")
    step(f"grown behind, without a copy, to {2 * size} bytes")

    check(driver.cuMemUnmap(address, 2 * size))
    refused(driver.cuMemcpyHtoD(address, b"none", 4), driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    check(driver.cuMemRelease(first))
    check(driver.cuMemRelease(second))
    check(driver.cuMemAddressFree(address, 2 * size))
    check(driver.cuDevicePrimaryCtxRelease(device))
    step("unmapped, released and freed")
    step("ok")


def importer(number):
    device, _ = start()
    with socket.socket(fileno=number) as peer:
        message, descriptors, _, _ = socket.recv_fds(peer, 8, 1)
        size = int.from_bytes(message, "little")
        memory = check(driver.cuMemImportFromShareableHandle(descriptors[0], KIND))
        os.close(descriptors[0])
        address = check(driver.cuMemAddressReserve(size, 0, 0, 0))
        map_at(address, size, memory)
        expect(read(address, size), pattern(size, 1), "in the other process")
        write(address, pattern(size, 2))
        check(driver.cuMemUnmap(address, size))
        check(driver.cuMemRelease(memory))
        check(driver.cuMemAddressFree(address, size))
        check(driver.cuDevicePrimaryCtxRelease(device))
        step("imported, read and written in the other process")
        peer.sendall(b"!")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--importer"]:
        importer(int(sys.argv[2]))
    else:
        exporter()
