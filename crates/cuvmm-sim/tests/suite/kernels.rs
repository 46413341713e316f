//! Modules and kernels: rules R48 and R62, and questions Q8 and Q27.

use std::ffi::{CStr, c_void};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, kernels};

use crate::common::{Gpu, UNIT, grant, read_write};

const NON_BLOCKING: CUstream_flags = CUstream_flags::NON_BLOCKING;
/// Longer than any test waits.
const LONG: u64 = 60_000_000_000;

#[test]
fn the_kernels_are_known_by_their_text_alone() {
    for gpu in Gpu::both() {
        assert_eq!(gpu.load(kernels::PTX), Err(201), "there is no context");
        let gpu = gpu.with_context();
        for text in [c"", c".version 7.0", c"// The test kernels."] {
            assert_eq!(gpu.load(text), Err(200));
        }
        let longer = [kernels::PTX.to_bytes(), b"\n\0"].concat();
        assert_eq!(gpu.load(CStr::from_bytes_with_nul(&longer).unwrap()), Err(200));
        let mut module = CUmodule::NULL;
        // SAFETY: null is what is asked about.
        assert_eq!(unsafe { gpu.raw().cuModuleLoadData(&raw mut module, std::ptr::null()) }.0, 1);
        let module = gpu.load(kernels::PTX).unwrap();
        for name in [kernels::FILL, kernels::READ, kernels::SPIN] {
            assert!(gpu.function(module, name).is_ok());
        }
        for name in [c"", c"fil", c"fills", c"Fill"] {
            assert_eq!(gpu.function(module, name), Err(500));
        }
        assert_eq!(gpu.simulator.live().modules, 1);
        assert_eq!(gpu.violations(), [""; 0]);
        assert_eq!([gpu.unload(module), gpu.unload(module)], [0, 400]);
        assert_eq!(gpu.function(module, kernels::FILL), Err(400));
        assert_eq!(gpu.violations().len(), 2, "used after it was unloaded");
        assert_eq!(gpu.simulator.live().modules, 0);
    }
}

#[test]
fn modules_end_with_their_context() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (module, fill) = (gpu.load(kernels::PTX).unwrap(), gpu.kernel(kernels::FILL));
        // SAFETY: a number.
        assert_eq!(unsafe { gpu.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }.0, 0);
        assert_eq!(gpu.simulator.live().modules, 0);
        gpu.enter(0);
        assert_eq!(gpu.function(module, kernels::FILL), Err(709));
        assert_eq!(gpu.run(fill, CUstream::LEGACY, &[0, 0, 0]), 709);
        assert_eq!(gpu.unload(module), 709);
    }
}

#[test]
fn fill_and_read_work_on_whole_words() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (fill, read) = (gpu.kernel(kernels::FILL), gpu.kernel(kernels::READ));
        let (from, to) = (gpu.buffer(UNIT), gpu.buffer(UNIT));
        let words = UNIT as u64 / 4;
        for stream in [CUstream::LEGACY, CUstream::PER_THREAD, gpu.stream(NON_BLOCKING)] {
            let value = 0x1_0000_0000 | stream.0.addr() as u64;
            assert_eq!(gpu.run(fill, stream, &[from.address + 4, value, words - 2]), 0);
            assert_eq!(gpu.run(read, stream, &[from.address, to.address, words]), 0);
            assert_eq!(gpu.synchronize(stream), 0);
            let word = |index: u64| gpu.word(to.address + 4 * index);
            assert_eq!([word(0), word(words - 1)], [0xA5A5_A5A5; 2], "not these");
            assert_eq!([word(1), word(words / 2), word(words - 2)], [value as u32; 3]);
        }
        assert_eq!(gpu.run(fill, CUstream::LEGACY, &[0, 0, 0]), 0, "no words, no matter where");
        assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn a_kernel_goes_across_adjacent_mappings() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let fill = gpu.kernel(kernels::FILL);
        let address = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        for at in [address, address + UNIT as u64] {
            assert_eq!(gpu.map(at, UNIT, gpu.create(UNIT).unwrap()), 0);
        }
        assert_eq!(gpu.grant(address, 2 * UNIT, &[read_write(0)]), 0);
        assert_eq!(gpu.run(fill, CUstream::LEGACY, &[address, 3, UNIT as u64 / 2]), 0);
        assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
        let seen = gpu.simulator.peek(CUdeviceptr(address), 2 * UNIT).unwrap();
        assert!(seen.chunks(4).all(|word| word == [3, 0, 0, 0]));
    }
}

#[test]
fn what_a_kernel_may_not_touch_breaks_the_context_when_it_runs() {
    type Breaking = fn(&Gpu, u64);
    let table: [(&str, u32, Breaking); 5] = [
        ("reserved only", 700, |gpu, address| assert_eq!(gpu.unmap(address, UNIT), 0)),
        ("never granted", 700, |gpu, address| {
            assert_eq!(gpu.unmap(address, UNIT), 0);
            assert_eq!(gpu.map(address, UNIT, gpu.create(UNIT).unwrap()), 0);
        }),
        ("granted nothing", 700, |gpu, address| {
            assert_eq!(gpu.grant(address, UNIT, &[grant(CUmemLocation::device(0), 0)]), 0);
        }),
        ("granted reads", 700, |gpu, address| {
            assert_eq!(gpu.grant(address, UNIT, &[grant(CUmemLocation::device(0), 1)]), 0);
        }),
        ("misaligned", 716, |_, _| {}),
    ];
    for (name, code, breaking) in table {
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let (fill, stream, buffer) = (gpu.kernel(kernels::FILL), gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
            breaking(&gpu, buffer.address);
            let address = buffer.address + if code == 716 { 2 } else { 0 };
            assert_eq!(gpu.run(fill, stream, &[address, 1, 1]), 0, "{name}: a launch asks nothing");
            assert_eq!(gpu.synchronize(stream), code, "{name}");
            assert_eq!(gpu.run(fill, stream, &[address, 1, 1]), code, "{name}: for good");
            gpu.close(gpu.buffer(UNIT));
            assert_eq!(gpu.violations(), [""; 0], "{name}");
        }
    }
}

#[test]
fn a_kernel_writes_up_to_where_it_fails() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (fill, stream, buffer) = (gpu.kernel(kernels::FILL), gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
        assert_eq!(gpu.run(fill, stream, &[buffer.address, 1, UNIT as u64]), 0);
        assert_eq!(gpu.synchronize(stream), 700);
        assert_eq!(gpu.word(buffer.address + UNIT as u64 - 4), 1);
    }
}

#[test]
fn memory_that_is_read_only_can_be_read() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (read, from, to) = (gpu.kernel(kernels::READ), gpu.buffer(UNIT), gpu.buffer(UNIT));
        assert_eq!(gpu.fill(from.address, 9, 4, CUstream::LEGACY), 0);
        assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
        assert_eq!(gpu.grant(from.address, UNIT, &[grant(CUmemLocation::device(0), 1)]), 0);
        assert_eq!(gpu.run(read, CUstream::LEGACY, &[from.address, to.address, 1]), 0);
        assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
        assert_eq!(gpu.word(to.address), 0x0909_0909);
    }
}

#[test]
fn a_kernel_sees_memory_as_its_contexts_device_does() {
    let gpu = Gpu::new(Machine::h200_pair());
    gpu.enter(0);
    let (fill, buffer) = (gpu.kernel(kernels::FILL), gpu.buffer(UNIT));
    gpu.enter(1);
    let other = gpu.kernel(kernels::FILL);
    assert_eq!(gpu.run(fill, CUstream::LEGACY, &[buffer.address, 1, 1]), 400, "a function of another context");
    assert_eq!(gpu.grant(buffer.address, UNIT, &[read_write(1)]), 0);
    assert_eq!(gpu.run(other, CUstream::LEGACY, &[buffer.address, 1, 1]), 0);
    assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
    assert_eq!(gpu.grant(buffer.address, UNIT, &[grant(CUmemLocation::device(1), 0)]), 0);
    assert_eq!(gpu.run(other, CUstream::LEGACY, &[buffer.address, 1, 1]), 0);
    assert_eq!(gpu.synchronize(CUstream::LEGACY), 700);
    gpu.enter(0);
    assert_eq!(gpu.run(fill, CUstream::LEGACY, &[buffer.address, 2, 1]), 700, "it broke the other context, too");
}

#[test]
fn spin_lasts_as_long_as_it_is_told() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (spin, stream, buffer) = (gpu.kernel(kernels::SPIN), gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
        assert_eq!(gpu.fill(buffer.address, 0, 4, stream), 0);
        let start = Instant::now();
        for address in [0, buffer.address] {
            assert_eq!(gpu.run(spin, stream, &[address, 20_000_000]), 0);
        }
        assert_eq!(gpu.query(stream), 600);
        assert_eq!(gpu.synchronize(stream), 0);
        assert!(start.elapsed() >= Duration::from_millis(40));
        assert!(gpu.word(buffer.address) > 1, "again and again");
    }
}

#[test]
fn memory_taken_from_under_a_running_kernel_fails_it() {
    type Taking = fn(&Gpu, u64) -> u32;
    let table: [(&str, Taking); 3] = [
        ("unmap under queued work", |gpu, address| gpu.unmap(address, UNIT)),
        ("access taken away under queued work", |gpu, address| {
            gpu.grant(address, UNIT, &[grant(CUmemLocation::device(0), 0)])
        }),
        ("access taken away under queued work", |gpu, address| {
            gpu.grant(address, UNIT, &[grant(CUmemLocation::device(0), 1)])
        }),
    ];
    for (violation, take) in table {
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let (spin, stream, buffer) = (gpu.kernel(kernels::SPIN), gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
            assert_eq!(gpu.run(spin, stream, &[buffer.address, LONG]), 0);
            gpu.await_spin(buffer.address);
            assert_eq!(take(&gpu, buffer.address), 0, "it doesn't wait");
            assert_eq!(gpu.synchronize(stream), 700);
            assert!(gpu.violations()[0].ends_with(violation), "{:?}", gpu.violations());
        }
    }
}

#[test]
fn growth_behind_a_running_kernel_is_harmless() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (spin, stream) = (gpu.kernel(kernels::SPIN), gpu.stream(NON_BLOCKING));
        let address = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        let behind = address + UNIT as u64;
        assert_eq!(gpu.map(address, UNIT, gpu.create(UNIT).unwrap()), 0);
        assert_eq!(gpu.grant(address, UNIT, &[read_write(0)]), 0);
        assert_eq!(gpu.run(spin, stream, &[address, 100_000_000]), 0);
        gpu.await_spin(address);
        assert_eq!(gpu.map(behind, UNIT, gpu.create(UNIT).unwrap()), 0);
        assert_eq!(gpu.grant(address, 2 * UNIT, &[read_write(0)]), 0);
        gpu.await_spin(address);
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn a_broken_context_runs_no_more_of_its_kernels() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (spin, fill) = (gpu.kernel(kernels::SPIN), gpu.kernel(kernels::FILL));
        let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        assert_eq!(gpu.run(spin, stream, &[0, LONG]), 0);
        assert_eq!(gpu.run(fill, other, &[UNIT as u64, 0, 1]), 0);
        // SAFETY: it takes nothing.
        assert_eq!(unsafe { gpu.raw().cuCtxSynchronize() }.0, 700, "and soon");
    }
}

#[test]
fn a_launch_needs_a_function_a_shape_and_parameters() {
    let unit = [1, 1, 1];
    let shapes = [
        ([0, 1, 1], unit, 0),
        ([1, 1, 0], unit, 0),
        ([1, 65_536, 1], unit, 0),
        (unit, [1, 0, 1], 0),
        (unit, [1025, 1, 1], 0),
        (unit, [512, 3, 1], 0),
        (unit, [1, 1, 65], 0),
        ([u32::MAX; 3], [u32::MAX; 3], u32::MAX),
        (unit, unit, 49_153),
    ];
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (fill, buffer, stream) = (gpu.kernel(kernels::FILL), gpu.buffer(UNIT), gpu.stream(NON_BLOCKING));
        let values = [buffer.address, 1, 1];
        for (grid, block, shared) in shapes {
            assert_eq!(gpu.launch_on(grid, block, shared, fill, stream, &values), 1, "{grid:?} {block:?} {shared}");
        }
        let mut value = 0_u64;
        let some: *mut c_void = (&raw mut value).cast();
        let (mut gap, mut whole) = ([some, std::ptr::null_mut(), some], [some; 3]);
        let none = std::ptr::null_mut();
        let table = [
            ("no parameters", none, none),
            ("one of them null", gap.as_mut_ptr(), none),
            ("a second way to pass them", whole.as_mut_ptr(), whole.as_mut_ptr()),
        ];
        for (name, parameters, extra) in table {
            // SAFETY: the pointers are null or lead to locals.
            let code = unsafe { gpu.raw().cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, parameters, extra) };
            assert_eq!(code.0, 1, "{name}");
        }
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(gpu.word(buffer.address), 0xA5A5_A5A5, "nothing ran");
        assert_eq!(gpu.violations(), [""; 0]);
        let other = CUfunction(std::ptr::without_provenance_mut(77));
        assert_eq!(gpu.run(other, stream, &values), 400);
        assert_eq!(gpu.violations().len(), 1);
    }
}

#[test]
fn a_module_is_not_to_be_unloaded_under_its_kernels() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let module = gpu.load(kernels::PTX).unwrap();
        let (fill, stream) = (gpu.function(module, kernels::FILL).unwrap(), gpu.stream(NON_BLOCKING));
        let gate = gpu.hold(stream);
        assert_eq!(gpu.run(fill, stream, &[0, 0, 0]), 0);
        assert_eq!(gpu.unload(module), 0);
        assert_eq!(gpu.violations().len(), 1);
        gate.open();
        assert_eq!(gpu.synchronize(stream), 0);
    }
}

#[test]
fn a_graph_is_not_to_outlive_the_modules_of_its_kernels() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (module, stream) = (gpu.load(kernels::PTX).unwrap(), gpu.stream(NON_BLOCKING));
        assert_eq!(gpu.begin(stream, CUstreamCaptureMode::GLOBAL), 0);
        assert_eq!(gpu.run(gpu.function(module, kernels::FILL).unwrap(), stream, &[0, 0, 0]), 0);
        let executable = gpu.instantiate(gpu.end(stream).unwrap());
        assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream), gpu.unload(module)], [0; 3]);
        assert_eq!(gpu.violations(), [""; 0]);
        assert_eq!(gpu.launch(executable, stream), 1);
        assert_eq!(gpu.violations().len(), 1);
    }
}

#[test]
fn a_captured_kernel_runs_when_its_graph_does() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (fill, stream, buffer) = (gpu.kernel(kernels::FILL), gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
        assert_eq!(gpu.begin(stream, CUstreamCaptureMode::GLOBAL), 0);
        assert_eq!(gpu.run(fill, stream, &[buffer.address, 6, 1]), 0);
        let executable = gpu.instantiate(gpu.end(stream).unwrap());
        assert_eq!(gpu.word(buffer.address), 0xA5A5_A5A5);
        assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream)], [0, 0]);
        assert_eq!(gpu.word(buffer.address), 6);
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream)], [0, 700]);
    }
}
