"""What the benchmarks in Python share: the steps that a buffer grows by, and rows as docs/benchmarks.json has them, which
`cargo xtask bench --from FILE` takes. The driver is asked by ctypes, so that no bindings are needed for that.
"""

import ctypes
import json
import re
import sys
import time

CASE = "grow-curve-63gib"
STEP = 256 << 20
STEPS = 252


def ask(name, *arguments):
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} answered {code}")


def number(name):
    value = ctypes.c_int()
    ask(name, ctypes.byref(value))
    return value.value


def free_bytes():
    """Of the device whose context is current."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ask("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def where():
    """GPU, driver and processors, as the benchmarks in Rust name them."""
    name = ctypes.create_string_buffer(256)
    ask("cuDeviceGetName", name, len(name), 0)
    version = number("cuDriverGetVersion")
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    kernel = re.search(r"(?<!\S)\d+(\.\d+)+(?!\S)", read("/proc/driver/nvidia/version"))
    models = re.findall(r"^model name\s*:\s*(.*?)\s*$", read("/proc/cpuinfo"), re.MULTILINE)
    processors = re.findall(r"^processor\s*:", read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "gpu": name.value.decode(),
        "driver": f"{kernel[0]}, {cuda}" if kernel else cuda,
        "gpus": number("cuDeviceGetCount"),
        "machine": f"{len(processors)} x {models[0] if models else 'processors of unknown model'}",
    }


def curve(subject, step):
    """The row of a subject whose `step` grows to a size, or of as many steps as it has before one fails."""
    before, peak, times, error = free_bytes(), 0, [], None
    for steps in range(1, STEPS + 1):
        start = time.perf_counter_ns()
        try:
            step(steps * STEP)
        except Exception as failure:  # Whatever ends it is told.
            error = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
            break
        times.append((time.perf_counter_ns() - start) / 1e3)
        peak = max(peak, before - free_bytes())
    ordered = sorted(times) or [0]
    permille = lambda share: round(ordered[(len(ordered) - 1) * share // 1000], 3)
    row = {"case": CASE, "subject": subject, "unit": "us", "p50": permille(500), "p99": permille(990)}
    row |= {"total": round(sum(times), 3), "n": len(times), **where(), "peak_bytes": peak}
    return row | {"error": error} if error else row


def write(rows):
    """To the file that is named, or where there is none, for people to see."""
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    print(text, end="", flush=True)
    if sys.argv[1:]:
        with open(sys.argv[1], "w") as file:
            file.write(text)
