//! What the drop of a buffer costs the thread that drops it: with nothing to wait for, behind a kernel, and deferred; beside
//! the driver's calls alone. On the simulator, or on a GPU with `CUVMM_DRIVER=cuda`.
//!
//! # Safety
//! What the raw calls name was made just before, is used by nobody else, and goes once.
#![allow(unsafe_code)]
#![allow(missing_docs, reason = "the functions are criterion's")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark stops at what it did not expect")]

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use cuvmm::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle,
};
use cuvmm::{Device, Driver, OnDrop, Options, Release, StreamRef, VirtualMemoryResource};
use cuvmm_tests::{G, Spin, benched_driver, drain};

/// How long the kernel runs that is waited for.
const KERNEL: Duration = Duration::from_micros(100);
/// How many buffers may be pending.
const PENDING: usize = 64;

/// Where kernels run.
struct Work {
    device: Device,
    spin: Spin,
    stream: StreamRef,
}

impl Work {
    fn queue(&self, address: CUdeviceptr) {
        self.spin.queue(&self.stream, address, KERNEL);
    }

    fn resource(&self, on_drop: OnDrop) -> VirtualMemoryResource {
        let options = Options::new().on_drop(on_drop).release(Release::Stream(self.stream.clone()));
        VirtualMemoryResource::new(&self.device, options).unwrap()
    }
}

/// Times `end` alone, done to what `begin` makes, with the cost of reading the clock twice.
fn time<T>(criterion: &mut Criterion, name: &str, begin: impl Fn() -> T, end: impl Fn(T)) {
    criterion.bench_function(name, |bencher| {
        bencher.iter_custom(|times| {
            let mut sum = Duration::ZERO;
            for _ in 0..times {
                let begun = begin();
                let start = Instant::now();
                end(begun);
                sum += start.elapsed();
            }
            sum
        });
    });
}

/// Memory that is mapped by the driver's calls alone.
struct Raw {
    address: CUdeviceptr,
    handle: CUmemGenericAllocationHandle,
}

impl Raw {
    fn map(device: &Device) -> Self {
        let (driver, location) = (device.driver(), device.location());
        let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
        let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE };
        let address = driver.mem_address_reserve(G, 0, CUdeviceptr(0)).unwrap();
        let handle = driver.mem_create(G, &properties).unwrap();
        // SAFETY: the addresses were reserved and the memory made just now.
        unsafe { driver.mem_map(address, G, handle) }.unwrap();
        // SAFETY: it was mapped just now.
        unsafe { driver.mem_set_access(address, G, &[access]) }.unwrap();
        Self { address, handle }
    }

    fn unmap(self, driver: &Driver) {
        // SAFETY: it is mapped, and no work uses it any more.
        unsafe { driver.mem_unmap(self.address, G) }.unwrap();
        // SAFETY: the handle is ours.
        unsafe { driver.mem_release(self.handle) }.unwrap();
        // SAFETY: nothing is mapped there any more.
        unsafe { driver.mem_address_free(self.address, G) }.unwrap();
    }
}

fn drop_cost(criterion: &mut Criterion) {
    let driver = benched_driver();
    let device = driver.device(0).unwrap();
    let work = Work { device: device.clone(), spin: Spin::load(&device), stream: StreamRef::create(&device).unwrap() };
    let synchronize = || {
        // SAFETY: the stream is alive.
        unsafe { driver.stream_synchronize(work.stream.as_raw()) }.unwrap();
    };

    let unmap = |raw: Raw| raw.unmap(&driver);
    let synchronize_and_unmap = |raw: Raw| {
        synchronize();
        raw.unmap(&driver);
    };
    time(criterion, "raw/unmap-release-free", || Raw::map(&device), unmap);
    time(criterion, "raw/synchronize-unmap-release-free/idle", || Raw::map(&device), synchronize_and_unmap);
    let busy = || {
        let raw = Raw::map(&device);
        work.queue(raw.address);
        raw
    };
    time(criterion, "raw/synchronize-unmap-release-free/busy", busy, synchronize_and_unmap);

    let resource = work.resource(OnDrop::Wait);
    time(criterion, "drop/waiting/idle", || resource.allocate(G).unwrap(), drop);
    let busy = || {
        let buffer = resource.allocate(G).unwrap();
        work.queue(buffer.address());
        buffer
    };
    time(criterion, "drop/waiting/busy", busy, drop);
    time(criterion, "close/busy", busy, |buffer| buffer.close().unwrap());

    let resource = work.resource(OnDrop::Defer);
    let bounded = |is_busy| {
        if resource.pending() >= PENDING {
            drain(&resource);
        }
        let buffer = resource.allocate(G).unwrap();
        if is_busy {
            work.queue(buffer.address());
        }
        buffer
    };
    time(criterion, "drop/deferred/idle", || bounded(false), drop);
    time(criterion, "drop/deferred/busy", || bounded(true), drop);
    drain(&resource);
    synchronize();
}

criterion_group!(benches, drop_cost);
criterion_main!(benches);
