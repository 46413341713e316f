//! Machines: what differs between them is answered as the machine has it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;
use cuvmm_sim::{Hints, Latency, Machine, NumaNode, Preset};

use crate::common::{Gpu, MIB, UNIT, device_memory, grant, read_write};

const NONE: CUmemAllocationHandleType = CUmemAllocationHandleType::NONE;
const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::FABRIC;

fn node_memory(node: i32) -> CUmemAllocationProp {
    CUmemAllocationProp::pinned(CUmemLocation::host_numa(node), NONE)
}

#[test]
fn the_odd_machine_makes_memory_of_each_kind_in_its_own_multiples() {
    let gpu = Gpu::new(Machine::odd());
    let kinds = [
        (device_memory(0, NONE), MIB),
        (device_memory(0, POSIX), 2 * MIB),
        (device_memory(2, FABRIC), 32 * MIB),
        (device_memory(0, CUmemAllocationHandleType(POSIX.0 | FABRIC.0)), 32 * MIB),
        (node_memory(1), 64 << 10),
    ];
    for (properties, least) in kinds {
        assert_eq!(gpu.granularity(&properties, 0), Ok(least));
        assert_eq!(gpu.granularity(&properties, 1), Ok(2 * least), "what is recommended");
        let handle = gpu.create_as(3 * least, &properties).unwrap();
        assert_eq!(gpu.create_as(least / 2, &properties), Err(1));
        let address = gpu.reserve(8 * 32 * MIB, 32 * MIB, 0).unwrap();
        assert_eq!(gpu.map(address + least as u64 / 2, 3 * least, handle), 1);
        assert_eq!(gpu.map(address + least as u64, 3 * least, handle), 0);
        assert_eq!(gpu.release(handle), 0);
    }
    assert!(gpu.violations().is_empty());
}

#[test]
fn the_odd_machine_has_one_node_with_memory_and_one_without() {
    for preset in [Preset::Strict, Preset::Measured] {
        let gpu = Gpu::new(Machine::odd().preset(preset));
        let made: Vec<_> = (-1..5).map(|node| gpu.create_as(64 << 10, &node_memory(node)).err()).collect();
        assert_eq!(made, [Some(1), Some(1), None, Some(1), Some(2), Some(1)], "nodes -1 to 4");
        let device = gpu.driver.device(0).unwrap();
        assert_eq!(device.attribute(CUdevice_attribute::HOST_NUMA_ID).unwrap(), Some(1));
    }
}

#[test]
fn the_odd_machine_has_links_between_two_of_its_devices_alone() {
    let machine = Machine::odd();
    let sizes: BTreeSet<usize> = machine.devices.iter().map(|device| device.total_memory).collect();
    assert_eq!(sizes.len(), 3);
    assert!(sizes.iter().any(|size| !size.is_multiple_of(MIB)));
    let gpu = Gpu::new(machine);
    let buffer = gpu.buffer(UNIT);
    assert_eq!(gpu.grant(buffer.address, UNIT, &[read_write(0), read_write(1)]), 0);
    assert_eq!(gpu.grant(buffer.address, UNIT, &[read_write(2)]), 1);
    let lonely = gpu.create_as(UNIT, &device_memory(2, NONE)).unwrap();
    let address = gpu.reserve(UNIT, 0, 0).unwrap();
    assert_eq!(gpu.map(address, UNIT, lonely), 0);
    assert_eq!(gpu.grant(address, UNIT, &[read_write(0)]), 1);
    assert_eq!(gpu.grant(address, UNIT, &[read_write(2)]), 0);
}

#[test]
fn the_odd_machine_has_neither_rdma_nor_compression_nor_dma_bufs() {
    let gpu = Gpu::new(Machine::odd());
    let device = gpu.driver.device(1).unwrap();
    assert!(!device.supports_rdma().unwrap() && !device.supports_compression().unwrap());
    assert!(!device.supports_dma_buf().unwrap());
    let mut properties = device_memory(1, NONE);
    properties.alloc_flags.gpu_direct_rdma_capable = 1;
    assert_eq!(gpu.create_as(UNIT, &properties), Err(801));
    let mut properties = device_memory(1, NONE);
    properties.alloc_flags.compression_type = 1;
    assert_eq!(gpu.create_as(UNIT, &properties), Err(801));
    let buffer = gpu.buffer(UNIT);
    gpu.enter(0);
    // SAFETY: the simulator looks the range up.
    let dma_buf = unsafe { gpu.driver.mem_get_dma_buf(CUdeviceptr(buffer.address), UNIT) };
    assert_eq!(dma_buf.unwrap_err().code().unwrap().0, 801);
}

#[test]
fn a_machine_may_grant_nothing_that_rdma_may_reach() {
    let mut machine = Machine::h200();
    machine.rdma_grants = Some(CUresult::INVALID_VALUE);
    let gpu = Gpu::new(machine);
    assert!(gpu.driver.device(0).unwrap().supports_rdma().unwrap());
    let mut properties = device_memory(0, NONE);
    let plain = gpu.create_as(UNIT, &properties).unwrap();
    properties.alloc_flags.gpu_direct_rdma_capable = 1;
    let reached = gpu.create_as(UNIT, &properties).unwrap();
    for (handle, code) in [(reached, 1), (plain, 0)] {
        let address = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.map(address, UNIT, handle), 0);
        assert_eq!(gpu.grant(address, UNIT, &[read_write(0)]), code);
    }
}

#[test]
fn a_machine_may_compress_nothing_and_none_compresses_what_rdma_may_reach() {
    for (compresses, rdma, compressed) in [(true, 0, 1), (true, 1, 0), (false, 0, 0)] {
        let mut machine = Machine::h200();
        machine.compresses = compresses;
        let gpu = Gpu::new(machine);
        let mut properties = device_memory(0, NONE);
        properties.alloc_flags.compression_type = 1;
        properties.alloc_flags.gpu_direct_rdma_capable = rdma;
        let handle = gpu.create_as(UNIT, &properties).unwrap();
        let flags = gpu.properties(handle).unwrap().alloc_flags;
        assert_eq!((flags.compression_type, flags.gpu_direct_rdma_capable), (compressed, rdma));
    }
}

#[test]
fn a_host_without_numa_has_node_0_and_says_minus_one() {
    let gpu = Gpu::new(Machine::h200().without_numa());
    let device = gpu.driver.device(0).unwrap();
    assert_eq!(device.attribute(CUdevice_attribute::HOST_NUMA_ID).unwrap(), Some(-1));
    assert!(gpu.create_as(UNIT, &node_memory(0)).is_ok());
    assert_eq!(gpu.create_as(UNIT, &node_memory(1)), Err(1));
    let host = CUmemAllocationProp::pinned(CUmemLocation { location_type: CUmemLocationType::HOST, id: 0 }, NONE);
    assert!(gpu.create_as(UNIT, &host).is_ok());
}

#[test]
fn a_node_has_as_much_memory_as_the_machine_says() {
    let gpu = Gpu::new(Machine::h200().numa_nodes([NumaNode { id: 2, memory: 3 * UNIT }]));
    let handle = gpu.create_as(2 * UNIT, &node_memory(2)).unwrap();
    assert_eq!(gpu.create_as(2 * UNIT, &node_memory(2)), Err(2));
    assert_eq!(gpu.release(handle), 0);
    assert!(gpu.create_as(3 * UNIT, &node_memory(2)).is_ok());
}

#[test]
fn the_limit_of_open_files_counts_what_can_be_shared_and_what_is_open() {
    for preset in [Preset::Strict, Preset::Measured] {
        let gpu = Gpu::new(Machine::h200().open_files(4).preset(preset));
        let [handle, other] = [gpu.create_exportable(UNIT), gpu.create_exportable(UNIT)];
        let [fd, second] = [gpu.export(handle).unwrap(), gpu.export(handle).unwrap()];
        assert_eq!(gpu.export(other).err(), Some(304));
        assert!(gpu.import(&fd).is_ok(), "an import opens no file");
        assert_eq!(gpu.create_as(UNIT, &device_memory(0, POSIX)), Err(304));
        let plain = gpu.create(UNIT).unwrap();
        assert_eq!(gpu.export(plain).err(), Some(1), "what is wrong with a call comes first");
        drop(second);
        let third = gpu.export(other).unwrap();
        assert_eq!(gpu.export(other).err(), Some(304));
        drop(third);
        assert_eq!(gpu.release(other), 0);
        assert!(gpu.create_as(UNIT, &device_memory(0, POSIX)).is_ok());
        assert!(gpu.export(handle).is_ok());
        assert!(gpu.violations().is_empty());
    }
}

/// How long a call took.
fn time<T>(call: impl FnOnce() -> T) -> Duration {
    let begin = Instant::now();
    let _ = call();
    begin.elapsed()
}

#[test]
fn calls_take_at_least_as_long_as_the_machine_says() {
    let gpu = Gpu::new(Machine::h200_pair().latency(Latency::h200_pair()));
    let size = 4 << 30;
    let (buffer, other) = (gpu.buffer(size), gpu.buffer(UNIT));
    let read_only = [grant(CUmemLocation::device(0), 1)];
    // What counts is the number of mappings.
    let many = gpu.reserve(8 * UNIT, 0, 0).unwrap();
    for index in 0..8 {
        assert_eq!(gpu.map(many + index * UNIT as u64, UNIT, other.handle), 0);
    }
    assert!(time(|| gpu.grant(many, 8 * UNIT, &[read_write(0)])) >= Duration::from_micros(8 * 31));
    assert!(time(|| gpu.grant(many, 8 * UNIT, &[read_write(0), read_write(1)])) >= Duration::from_micros(8 * 31));
    assert_eq!(gpu.unmap(buffer.address, size), 0);
    assert!(time(|| gpu.release(buffer.handle)) >= Duration::from_micros(2000));
    assert!(time(|| gpu.grant(other.address, UNIT, &read_only)) >= Duration::from_millis(1), "12 ms are slow");
}

#[test]
fn other_calls_get_on_while_one_takes_its_time() {
    let gpu = Gpu::new(Machine::h200().latency(Latency::h200())).with_context();
    let stream = gpu.stream(CUstream_flags::NON_BLOCKING);
    let made = AtomicBool::new(false);
    let mut calls = 0;
    std::thread::scope(|scope| {
        // It takes 229 ms.
        scope.spawn(|| {
            gpu.create_as(1 << 30, &node_memory(0)).unwrap();
            made.store(true, Ordering::Release);
        });
        while gpu.simulator.live().allocations == 0 {
            std::thread::yield_now();
        }
        while !made.load(Ordering::Acquire) {
            assert_eq!(gpu.query(stream), 0);
            calls += 1;
        }
    });
    assert!(calls > 10, "{calls}");
}

#[test]
fn a_call_that_is_refused_takes_no_time_of_its_own() {
    let gpu = Gpu::new(Machine::h200().latency(Latency::h200()));
    let node = node_memory(0);
    let refused = time(|| assert_eq!(gpu.create_as(1 << 40, &node), Err(2)));
    assert!(refused < Duration::from_secs(60), "making so much takes minutes");
}

#[test]
fn no_number_of_a_machine_is_too_odd_to_be_answered_for() {
    let mut machines = Vec::new();
    for unit in [0, 3, 4097, (1 << 63) + 1, usize::MAX] {
        let mut machine = Machine::h200();
        machine.reservation_unit = unit;
        machines.push(machine);
    }
    let granularities: [fn(&CUmemAllocationProp, CUmemAllocationGranularity_flags) -> usize; 4] =
        [|_, _| 0, |_, _| 3, |_, _| 4097, |_, _| usize::MAX];
    machines.extend(granularities.map(|granularity| Machine::h200().granularity(granularity)));
    let node = |id, memory| NumaNode { id, memory };
    machines.push(Machine::h200().numa_nodes([node(-1, usize::MAX), node(i32::MIN, usize::MAX), node(-1, 0)]));
    machines.push(Machine::h200().device_memory(usize::MAX).address_window(u64::MAX).open_files(usize::MAX));
    machines.push(Machine::h200().device_memory(0).address_window(0).open_files(0));
    machines.push(Machine::h200().hints(Hints::Refused(CUresult::SUCCESS)));
    for machine in machines {
        for preset in [Preset::Strict, Preset::Measured] {
            let gpu = Gpu::new(machine.clone().preset(preset)).with_context();
            for size in [1, 4097, UNIT, 1 << 46, 1 << 63, usize::MAX] {
                for properties in [device_memory(0, POSIX), node_memory(-1), node_memory(0)] {
                    let handle = gpu.create_as(size, &properties).unwrap_or(0);
                    for (alignment, hint) in [(0, 0), (1 << 46, 1 << 46), (1 << 63, 1 << 63), (3, 3)] {
                        let address = gpu.reserve(size, alignment, hint).unwrap_or(0);
                        let mapped = gpu.map(address, size, handle) == 0;
                        let grants = [read_write(0), grant(CUmemLocation::host(), 3)];
                        let granted = mapped && gpu.grant(address, size, &grants) == 0;
                        assert!(!granted || gpu.read(address, 1).is_ok());
                        assert!(gpu.unmap(address, size) == 0 || !mapped);
                        assert_eq!(gpu.free(address, size) == 0, address != 0);
                    }
                    assert_eq!(gpu.release(handle) == 0, handle != 0);
                }
            }
            assert!(gpu.simulator.live().mappings == 0 && gpu.simulator.live().reservations == 0);
        }
    }
}
