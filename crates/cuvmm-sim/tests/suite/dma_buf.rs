//! Memory for devices of other makers: rules R90 and R91, question Q22.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, Preset};

use crate::common::{Gpu, UNIT, code_of, device_memory, ok};

fn dma_buf(gpu: &Gpu, address: u64, size: usize) -> Result<OwnedFd, u32> {
    // SAFETY: the simulator looks the range up.
    unsafe { gpu.driver.mem_get_dma_buf(CUdeviceptr(address), size) }.map_err(code_of)
}

fn dma_buf_with(gpu: &Gpu, address: u64, kind: u32, flags: u64) -> Result<OwnedFd, u32> {
    let mut number = -1_i32;
    let (out, kind) = ((&raw mut number).cast(), CUmemRangeHandleType(kind));
    // SAFETY: the output is a C int of ours.
    let code = unsafe { gpu.raw().cuMemGetHandleForAddressRange(out, CUdeviceptr(address), UNIT, kind, flags) };
    // SAFETY: it was opened just now, and is nobody else's.
    ok(code, number).map(|number| unsafe { OwnedFd::from_raw_fd(number) })
}

#[test]
fn whole_pages_of_mapped_memory_are_given_a_descriptor() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        for index in 0..2 {
            assert_eq!(gpu.map(address + index * UNIT as u64, UNIT, gpu.create(UNIT).unwrap()), 0);
        }
        for (from, size) in [(0, UNIT), (0, 2 * UNIT), (4096, 4096), (UNIT as u64 - 4096, 8192)] {
            let fd = dma_buf(&gpu, address + from, size).unwrap();
            let flags = rustix::io::fcntl_getfd(&fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
        let refused = [(0, 0), (0, 4095), (1, 4096), (0, 3 * UNIT), (UNIT as u64, 2 * UNIT), (2 * UNIT as u64, UNIT)];
        for (from, size) in refused {
            assert_eq!(dma_buf(&gpu, address + from, size).err(), Some(1), "{size} at {from}");
        }
        assert_eq!(dma_buf(&gpu, address, usize::MAX - 4095).err(), Some(1));
        assert_eq!(dma_buf_with(&gpu, address, 0, 0).err(), Some(1), "no such kind");
        assert_eq!(dma_buf_with(&gpu, address, 1, 2).err(), Some(1), "no such flag");
        assert_eq!(dma_buf_with(&gpu, address, 1, 1).err(), Some(801), "nothing but PCIe");
        assert!(gpu.violations().is_empty());
    }
}

#[test]
fn all_of_a_dma_buf_is_on_one_device_and_of_one_kind() {
    let gpu = Gpu::new(Machine::h200_pair()).with_context();
    let address = gpu.reserve(3 * UNIT, 0, 0).unwrap();
    let mut other = device_memory(0, CUmemAllocationHandleType::NONE);
    other.alloc_flags.gpu_direct_rdma_capable = 1;
    let all =
        [device_memory(0, CUmemAllocationHandleType::NONE), device_memory(1, CUmemAllocationHandleType::NONE), other];
    for (index, properties) in all.iter().enumerate() {
        let handle = gpu.create_as(UNIT, properties).unwrap();
        assert_eq!(gpu.map(address + (index * UNIT) as u64, UNIT, handle), 0);
        assert!(dma_buf(&gpu, address + (index * UNIT) as u64, UNIT).is_ok());
    }
    assert_eq!(dma_buf(&gpu, address, 2 * UNIT).err(), Some(1), "two devices");
    assert_eq!(dma_buf(&gpu, address + UNIT as u64, 2 * UNIT).err(), Some(1), "two kinds");
}

#[test]
fn a_device_that_has_none_refuses_them() {
    let mut machine = Machine::h200();
    machine.devices[0].attributes.insert(CUdevice_attribute::DMA_BUF_SUPPORTED.0, 0);
    let gpu = Gpu::new(machine).with_context();
    let buffer = gpu.buffer(UNIT);
    assert_eq!(dma_buf(&gpu, buffer.address, UNIT).err(), Some(801));
    let host = Gpu::strict().with_context();
    let memory = CUmemAllocationProp::pinned(CUmemLocation::host_numa(0), CUmemAllocationHandleType::NONE);
    let buffer = host.buffer_of(host.create_as(UNIT, &memory).unwrap(), UNIT);
    assert_eq!(dma_buf(&host, buffer.address, UNIT).err(), Some(1), "the host's memory");
}

#[test]
fn a_dma_buf_holds_the_memory_and_gives_no_way_to_it() {
    let gpu = Gpu::strict();
    let buffer = gpu.buffer(UNIT);
    assert_eq!(dma_buf(&gpu, buffer.address, UNIT).err(), Some(201), "alone of its kind it needs a context");
    gpu.enter(0);
    let fd = dma_buf(&gpu, buffer.address, UNIT).unwrap();
    gpu.close(buffer);
    assert_eq!(gpu.simulator.physical_bytes(0), UNIT);
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, 0);
    assert!(rustix::fs::ftruncate(&fd, 4096).is_err());
    assert_eq!(gpu.import(&fd), Err(999), "it is no exported memory");
    assert!(fd.as_raw_fd() > 0);
    drop(fd);
    assert!(gpu.simulator.wait_released(Instant::now() + Duration::from_secs(5)));
    assert!(gpu.simulator.live().device_bytes.is_empty());
}

fn flush(gpu: &Gpu, target: u32, scope: u32) -> u32 {
    let (target, scope) = (CUflushGPUDirectRDMAWritesTarget(target), CUflushGPUDirectRDMAWritesScope(scope));
    // SAFETY: it takes no pointers.
    unsafe { gpu.raw().cuFlushGPUDirectRDMAWrites(target, scope) }.0
}

#[test]
fn a_flush_needs_a_context_and_a_known_scope() {
    for preset in [Preset::Strict, Preset::Measured] {
        let gpu = Gpu::new(Machine::h200().preset(preset));
        assert_eq!(flush(&gpu, 0, 100), 201);
        gpu.enter(0);
        let answers =
            [(0, 100), (0, 200), (0, 0), (0, 300), (1, 100)].map(|(target, scope)| flush(&gpu, target, scope));
        assert_eq!(answers, [0, 0, 1, 1, 1]);
    }
}
