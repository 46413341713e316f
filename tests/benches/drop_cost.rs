//! What the drop of a buffer costs the thread that drops it: with nothing to wait for, behind a kernel, and deferred; beside
//! the driver's calls alone. On the simulator, or on a GPU with `CUVMM_DRIVER=cuda`.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the functions are criterion's")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark stops at what it did not expect")]

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use cuvmm::driver::sys::CUdeviceptr;
use cuvmm::{Device, OnDrop, Options, Release, StreamRef, VirtualMemoryResource};
use cuvmm_tests::{G, RawBuffer, Spin, benched_driver, drain, synchronize};

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
fn raw(device: &Device) -> RawBuffer {
    let mut raw = RawBuffer::reserve(device, G);
    raw.add(G);
    raw
}

fn drop_cost(criterion: &mut Criterion) {
    let driver = benched_driver();
    let device = driver.device(0).unwrap();
    let work = Work { device: device.clone(), spin: Spin::load(&device), stream: StreamRef::create(&device).unwrap() };

    let synchronize_and_unmap = |raw: RawBuffer| {
        synchronize(&work.stream);
        raw.finish();
    };
    time(criterion, "raw/unmap-release-free", || raw(&device), RawBuffer::finish);
    time(criterion, "raw/synchronize-unmap-release-free/idle", || raw(&device), synchronize_and_unmap);
    let busy = || {
        let raw = raw(&device);
        work.queue(raw.address());
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
    synchronize(&work.stream);
}

criterion_group!(benches, drop_cost);
criterion_main!(benches);
