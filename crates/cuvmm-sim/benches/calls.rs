//! What a simulated call costs beside the system calls that it needs: alone, and in a crowd of mappings and streams.
//!
//! `system/…` are those system calls by themselves, on ranges of the same size: the call's own cost is what lies above.
//!
//! # Safety
//! Every range that is mapped here is unmapped here, and nothing reads or writes through it.
#![allow(unsafe_code)]
#![allow(missing_docs, reason = "the functions are criterion's")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block makes calls of one kind")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at what it did not expect")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Hooked, RawDriver};
use cuvmm_sim::{Faults, Ledger, Machine, Simulator};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

const SIZE: usize = 64 << 10;
const MAPPINGS: usize = 10_000;
const STREAMS: usize = 1_000;
/// How much work is queued before it is waited for, which is not measured.
const QUEUED: u64 = 256;

#[track_caller]
fn ok(code: CUresult) {
    assert_eq!(code, CUresult::SUCCESS);
}

/// A driver with a context, a mapped and granted chunk, a stream and an event.
struct Bench<D> {
    driver: D,
    address: CUdeviceptr,
    free: CUdeviceptr,
    memory: CUmemGenericAllocationHandle,
    stream: CUstream,
    event: CUevent,
}

fn properties() -> CUmemAllocationProp {
    CUmemAllocationProp::pinned(CUmemLocation::device(0), CUmemAllocationHandleType::NONE)
}

impl<D: RawDriver> Bench<D> {
    fn new(driver: D) -> Self {
        let mut context = CUcontext::NULL;
        let (mut stream, mut event) = (CUstream::NULL, CUevent::NULL);
        // SAFETY: the outputs are locals.
        unsafe {
            ok(driver.cuInit(0));
            ok(driver.cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(0)));
            ok(driver.cuCtxSetCurrent(context));
            ok(driver.cuStreamCreate(&raw mut stream, CUstream_flags::NON_BLOCKING));
            ok(driver.cuEventCreate(&raw mut event, CUevent_flags::DISABLE_TIMING));
        }
        let empty = (CUdeviceptr(0), CUmemGenericAllocationHandle(0));
        let bench = Self { driver, address: empty.0, free: empty.0, memory: empty.1, stream, event };
        let (address, memory) = (bench.reserve(2 * SIZE), bench.create());
        let bench = Self { address, free: CUdeviceptr(address.0 + SIZE as u64), memory, ..bench };
        bench.map(address);
        bench.grant(address, SIZE);
        bench.fill();
        bench.wait();
        bench
    }

    /// With many mappings and streams beside.
    fn crowded(driver: D) -> Self {
        let bench = Self::new(driver);
        let range = bench.reserve(MAPPINGS * SIZE);
        for index in 0..MAPPINGS {
            bench.map(CUdeviceptr(range.0 + (index * SIZE) as u64));
        }
        bench.grant(range, MAPPINGS * SIZE);
        for _ in 0..STREAMS {
            let mut stream = CUstream::NULL;
            // SAFETY: the output is a local.
            ok(unsafe { bench.driver.cuStreamCreate(&raw mut stream, CUstream_flags::DEFAULT) });
        }
        bench
    }

    fn reserve(&self, size: usize) -> CUdeviceptr {
        let mut address = CUdeviceptr(0);
        // SAFETY: the output is a local.
        ok(unsafe { self.driver.cuMemAddressReserve(&raw mut address, size, 0, CUdeviceptr(0), 0) });
        address
    }

    fn create(&self) -> CUmemGenericAllocationHandle {
        let (mut memory, properties) = (CUmemGenericAllocationHandle(0), properties());
        // SAFETY: the pointers are locals'.
        ok(unsafe { self.driver.cuMemCreate(&raw mut memory, SIZE, &raw const properties, 0) });
        memory
    }

    fn map(&self, address: CUdeviceptr) {
        // SAFETY: the range is reserved and empty, and the handle alive.
        ok(unsafe { self.driver.cuMemMap(address, SIZE, 0, self.memory, 0) });
    }

    fn grant(&self, address: CUdeviceptr, size: usize) {
        let access = CUmemAccessDesc { location: CUmemLocation::device(0), flags: CUmemAccess_flags::READWRITE };
        // SAFETY: the range is mapped.
        ok(unsafe { self.driver.cuMemSetAccess(address, size, &raw const access, 1) });
    }

    fn fill(&self) {
        // SAFETY: the range is mapped, granted, and stays so.
        ok(unsafe { self.driver.cuMemsetD8Async(self.address, 1, 64, self.stream) });
    }

    fn record(&self) {
        // SAFETY: both are alive.
        ok(unsafe { self.driver.cuEventRecord(self.event, self.stream) });
    }

    fn wait(&self) {
        // SAFETY: the stream is alive.
        ok(unsafe { self.driver.cuStreamSynchronize(self.stream) });
    }

    /// How long `count` submissions take: what waits for them is not in it.
    fn submit(&self, count: u64, submit: impl Fn(&Self)) -> Duration {
        let mut taken = Duration::ZERO;
        let mut left = count;
        while left > 0 {
            let part = left.min(QUEUED);
            let start = Instant::now();
            (0..part).for_each(|_| submit(self));
            taken += start.elapsed();
            self.wait();
            left -= part;
        }
        taken
    }

    fn measure(&self, criterion: &mut Criterion, group: &str) {
        let driver = &self.driver;
        let mut of = |name: &str, work: &mut dyn FnMut()| {
            criterion.bench_function(&format!("{group}/{name}"), |bencher| bencher.iter(&mut *work));
        };
        // SAFETY: in all of these, handles are alive, ranges are what the calls need, and outputs are locals.
        unsafe {
            of("reserve-free", &mut || {
                let address = self.reserve(SIZE);
                ok(driver.cuMemAddressFree(address, SIZE));
            });
            of("create-release", &mut || ok(driver.cuMemRelease(self.create())));
            of("map-unmap", &mut || {
                self.map(self.free);
                ok(driver.cuMemUnmap(self.free, SIZE));
            });
            of("set-access", &mut || self.grant(self.address, SIZE));
            of("get-access", &mut || {
                let (mut flags, location) = (0, CUmemLocation::device(0));
                ok(driver.cuMemGetAccess(&raw mut flags, &raw const location, self.address));
                black_box(flags);
            });
            of("retain-release", &mut || {
                let mut memory = CUmemGenericAllocationHandle(0);
                let address = std::ptr::without_provenance_mut(self.address.0 as usize);
                ok(driver.cuMemRetainAllocationHandle(&raw mut memory, address));
                ok(driver.cuMemRelease(memory));
            });
            of("get-current", &mut || {
                let mut context = CUcontext::NULL;
                ok(driver.cuCtxGetCurrent(&raw mut context));
                black_box(context);
            });
            of("is-capturing", &mut || {
                let mut status = CUstreamCaptureStatus::default();
                ok(driver.cuStreamIsCapturing(self.stream, &raw mut status));
                let _ = black_box(status);
            });
            of("stream-query", &mut || ok(driver.cuStreamQuery(self.stream)));
            of("stream-synchronize", &mut || ok(driver.cuStreamSynchronize(self.stream)));
            of("event-query", &mut || ok(driver.cuEventQuery(self.event)));
        }
        for (name, submit) in [("memset-async", Self::fill as fn(&Self)), ("event-record", Self::record)] {
            criterion.bench_function(&format!("{group}/{name}"), |bencher| {
                bencher.iter_custom(|count| self.submit(count, submit));
            });
        }
    }
}

fn system(criterion: &mut Criterion) {
    let mut of = |name: &str, protection, flags| {
        criterion.bench_function(&format!("system/{name}"), |bencher| {
            bencher.iter(|| {
                // SAFETY: a new mapping wherever the kernel likes, which is ours to unmap.
                let range = unsafe { mmap_anonymous(std::ptr::null_mut(), SIZE, protection, flags) }.unwrap();
                // SAFETY: as above.
                unsafe { munmap(range, SIZE) }.unwrap();
            });
        });
    };
    of("reserve-free", ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    of("create-release", ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
}

fn calls(criterion: &mut Criterion) {
    system(criterion);
    Bench::new(Simulator::new(Machine::small())).measure(criterion, "alone");
    Bench::crowded(Simulator::new(Machine::small())).measure(criterion, "crowd");
    // What the log and a plan of failures in front cost.
    let hooked = Hooked::new(Hooked::new(Simulator::new(Machine::small()), Ledger::new()), Faults::new());
    Bench::new(hooked).measure(criterion, "hooked");
}

criterion_group!(benches, calls);
criterion_main!(benches);
