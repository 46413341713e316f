"""Grows by 256 MiB a step to 63 GiB, or as far as it gets, with PyTorch's expandable segments. `bench_torch.py [FILE]` leaves
the rows in the file.

A tensor can't grow in place, whatever the allocator does below it. So there are two subjects: `torch` keeps what it has and
allocates one more tensor of 256 MiB, for which the segment grows, and has at the end as many tensors as steps; `torch-copy`
has one tensor, and makes a larger one, copies, and drops the old one.
"""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch

import bench_rows


def tensor(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def extend():
    tensors = []
    return lambda _size: tensors.append(tensor(bench_rows.STEP))


def copy():
    old = None

    def step(size):
        nonlocal old
        larger = tensor(size)
        if old is not None:
            larger[: old.numel()].copy_(old)
        old = larger
        torch.cuda.synchronize()

    return step


def measured(subject, begin):
    # The step owns the tensors, and goes when its row is made.
    row = bench_rows.curve(subject, begin())
    torch.cuda.empty_cache()
    return row


torch.cuda.init()
tensor(1 << 20)
bench_rows.write([measured("torch", extend), measured("torch-copy", copy)])
