"""Grows a buffer of cuda.core's VirtualMemoryResource by 256 MiB a step to 63 GiB, or as far as it gets, as its user would:
by modify_allocation, with the options that it has by itself. `bench_cuda_core.py [FILE]` leaves the row in the file.
"""

import os

from cuda.core import Device, VirtualMemoryResource

import bench_rows


def grow(resource):
    buffer = None

    def step(size):
        nonlocal buffer
        if buffer is None:
            buffer = resource.allocate(size)
        else:
            buffer = resource.modify_allocation(buffer, size)
        if buffer.size != size:
            raise RuntimeError(f"a buffer of {size} bytes has {buffer.size}")

    return step


device = Device(0)
device.set_current()
step = grow(VirtualMemoryResource(device))
bench_rows.write([bench_rows.curve("cuda.core", step)])
# A buffer that grew is not one allocation any more, which its end takes it for: what is left the system gives back.
os._exit(0)
