//! Buffers of a simulated device, and patterns in them.
#![allow(dead_code, reason = "each suite uses its part of it")]

use std::time::{Duration, Instant};

use cuvmm_driver::Driver;
use cuvmm_driver::sys::CUmemAllocationHandleType;
use cuvmm_resource::{HandleKind, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Live, Machine, Simulator};

use crate::support::OpenFiles;

/// The granularity of the small machine.
pub(crate) const G: usize = 64 << 10;

/// A simulated machine that is found as it was left.
pub(crate) struct Bench {
    pub(crate) simulator: Simulator,
    pub(crate) driver: Driver,
}

impl Bench {
    pub(crate) fn new(machine: Machine) -> Self {
        let simulator = Simulator::new(machine);
        let driver = simulator.driver().unwrap();
        Self { simulator, driver }
    }

    pub(crate) fn small() -> Self {
        Self::new(Machine::small())
    }

    /// A resource of the first device, whose buffers can be shared.
    pub(crate) fn shareable(&self) -> VirtualMemoryResource {
        shareable(&self.driver, 0)
    }

    /// What is alive in the process.
    pub(crate) fn live(&self) -> Live {
        self.simulator.live()
    }

    /// A process that a test beside this one starts has copies of all descriptors until it executes its program, and they
    /// hold memory: so what is held too long is waited for.
    pub(crate) fn assert_live(&self, expect: &Live) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.simulator.live() != *expect && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.simulator.live(), *expect);
        assert_eq!(self.simulator.violations(), []);
    }
}

/// Runs `work` on a small machine of its own, with a resource whose buffers can be shared, and demands that it leaves
/// nothing there and no file open.
pub(crate) fn leaves_nothing(work: impl FnOnce(&Bench, &VirtualMemoryResource)) {
    let files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    work(&bench, &resource);
    drop(resource);
    bench.assert_live(&Live::default());
    drop(bench);
    files.assert_unchanged();
}

/// A resource of that device, whose buffers can be shared. What its handles look like is known.
pub(crate) fn shareable(driver: &Driver, ordinal: i32) -> VirtualMemoryResource {
    let device = driver.device(ordinal).unwrap();
    device.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR);
    VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd)).unwrap()
}

/// A buffer of so many chunks of different sizes.
pub(crate) fn grown(resource: &VirtualMemoryResource, chunks: usize) -> VirtualMemoryBuffer {
    let granularity = resource.granularity().bytes();
    let mut buffer = resource.allocate(granularity).unwrap();
    while buffer.chunks().len() < chunks {
        // One grow adds two chunks where it fills up a reservation and makes another.
        let last = buffer.chunks().len() + 1 == chunks;
        let units = if last { 1 } else { 1 + buffer.chunks().len() % 3 };
        let size = buffer.size() + granularity * units;
        buffer = buffer.grow_into(size).unwrap();
    }
    assert_eq!(buffer.chunks().len(), chunks);
    buffer
}

/// Bytes that differ from page to page, and by `seed`.
fn pattern(seed: u8, size: usize) -> Vec<u8> {
    let mut page: Vec<u8> = (0..4096u32).map(|index| (index % 251) as u8 ^ seed).collect();
    let mut bytes = Vec::with_capacity(size);
    for number in 0..size.div_ceil(page.len()) as u64 {
        page[..8].copy_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&page);
    }
    bytes.truncate(size);
    bytes
}

pub(crate) fn write(buffer: &VirtualMemoryBuffer, seed: u8) {
    buffer.copy_from_host(0, &pattern(seed, buffer.size())).unwrap();
}

pub(crate) fn assert_reads(buffer: &VirtualMemoryBuffer, seed: u8) {
    let mut bytes = vec![0; buffer.size()];
    buffer.copy_to_host(0, &mut bytes).unwrap();
    assert!(bytes == pattern(seed, buffer.size()), "the buffer holds something else than pattern {seed}");
}
