//! A buffer that grows to 63 GiB by 256 MiB a step: ours, by the driver's virtual memory calls, and by allocating, copying and
//! freeing.
//!
//! # Safety
//! What the driver's calls name was made just before, is used by nobody else, and goes once; each waits for what was queued.
#![allow(unsafe_code)]

use std::time::Duration;

use cuvmm::driver::sys::{CUdeviceptr, CUstream};
use cuvmm::{CUresult, Options, StreamRef};
use cuvmm_tests::{MIB, RawBuffer, Times, in_context_of, is_gpu_benched, synchronize};

use crate::{Bench, settle, timed};

const CASE: &str = "grow-curve-63gib";
pub(crate) const STEP: usize = 256 * MIB;
pub(crate) const STEPS: usize = 252;
/// How often the whole curve is run, but for those subjects that copy: that whose total is the middle one counts.
const ROUNDS: usize = 7;

/// How long each step took, and the most memory that was in use.
type Curve = (Times, usize);

pub(crate) fn run(bench: &mut Bench) {
    if !bench.wants(CASE) {
        return;
    }
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        if round % 2 == 0 {
            ours.push(by_growing(bench));
            raw.push(by_virtual_memory(bench));
        } else {
            raw.push(by_virtual_memory(bench));
            ours.push(by_growing(bench));
        }
    }
    add(bench, "cuvmm", middle(ours));
    add(bench, "raw", middle(raw));
    if is_gpu_benched() {
        // A simulator copies in the host's memory, of which there may not be so much; and it has no pools.
        let (copied, pooled) = (by_copying(bench), by_pool(bench));
        add(bench, "copy", copied);
        add(bench, "pool", pooled);
    }
}

/// The round whose total is the middle one, with the peak of all.
fn middle(mut rounds: Vec<Curve>) -> Curve {
    let peak = rounds.iter().map(|(_, peak)| *peak).max().unwrap_or_default();
    rounds.sort_by_key(|(times, _)| times.total());
    (rounds.swap_remove(rounds.len() / 2).0, peak)
}

fn add(bench: &mut Bench, subject: &str, (times, peak): Curve) {
    bench.rows.add_with_peak(CASE, subject, &times, peak);
}

/// Makes memory once. The first that is made after so much was released takes 12 to 20 ms, whoever makes it (measured), also a
/// second later: that is no step's.
fn make_first(bench: &Bench) {
    let mut first = RawBuffer::reserve(&bench.device, STEP);
    first.add(STEP);
    first.finish();
    settle(STEP);
}

/// Does each step, and looks after each how much memory is in use that was not before.
fn steps(bench: &Bench, mut step: impl FnMut(usize) -> Duration) -> Curve {
    make_first(bench);
    let free = || in_context_of(&bench.stream, || bench.device.driver().mem_get_info()).unwrap().free;
    let before = free();
    let mut peak = 0;
    let times = (1..=STEPS).map(|steps| {
        let took = step(steps * STEP);
        peak = peak.max(before.saturating_sub(free()));
        took
    });
    (times.collect(), peak)
}

fn by_growing(bench: &Bench) -> Curve {
    let resource = bench.resource(Options::new());
    let mut buffer = Some(resource.allocate_with_capacity(0, STEPS * STEP).unwrap());
    let curve = steps(bench, |size| {
        let (took, grown) = timed(|| buffer.take().unwrap().grow_into(size).unwrap());
        buffer = Some(grown);
        took
    });
    buffer.unwrap().close().unwrap();
    settle(STEPS * STEP);
    curve
}

fn by_virtual_memory(bench: &Bench) -> Curve {
    let mut raw = RawBuffer::reserve(&bench.device, STEPS * STEP);
    let curve = steps(bench, |_| timed(|| raw.add(STEP)).0);
    raw.finish();
    settle(STEPS * STEP);
    curve
}

/// Waits until the copy is done, and says so by the stream.
fn copy(stream: &StreamRef, from: CUdeviceptr, to: CUdeviceptr, bytes: usize) {
    if bytes > 0 {
        // SAFETY: both are alive, and the old one is freed after the wait.
        unsafe { stream.driver().memcpy_dtod_async(to, from, bytes, stream.as_raw()) }.unwrap();
    }
}

fn by_copying(bench: &Bench) -> Curve {
    let (driver, stream) = (bench.device.driver(), &bench.stream);
    let mut old = CUdeviceptr(0);
    let curve = steps(bench, |size| {
        in_context_of(stream, || {
            timed(|| {
                let address = driver.mem_alloc(size).unwrap();
                copy(stream, old, address, size - STEP);
                synchronize(stream);
                // SAFETY: nothing uses it any more.
                unsafe { driver.mem_free(old) }.unwrap();
                old = address;
            })
            .0
        })
    });
    // SAFETY: as above.
    in_context_of(stream, || unsafe { driver.mem_free(old) }).unwrap();
    settle(2 * STEPS * STEP);
    curve
}

/// By memory that is ordered by streams, of a pool of the driver's.
fn by_pool(bench: &Bench) -> Curve {
    type Allocate = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;
    type Free = unsafe extern "C" fn(CUdeviceptr, CUstream) -> CUresult;
    // SAFETY: it is the library that the driver was loaded from, and started.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: the driver's header declares it so.
    let allocate = unsafe { library.get::<Allocate>(c"cuMemAllocAsync") }.unwrap();
    // SAFETY: as above.
    let free = unsafe { library.get::<Free>(c"cuMemFreeAsync") }.unwrap();
    let stream = &bench.stream;
    let mut old = CUdeviceptr(0);
    let curve = steps(bench, |size| {
        in_context_of(stream, || {
            timed(|| {
                let mut address = CUdeviceptr(0);
                // SAFETY: the output is ours, and the stream alive.
                assert!(unsafe { allocate(&raw mut address, size, stream.as_raw()) }.is_success());
                copy(stream, old, address, size - STEP);
                if old.0 != 0 {
                    // SAFETY: the copy is ordered before it.
                    assert!(unsafe { free(old, stream.as_raw()) }.is_success());
                }
                synchronize(stream);
                old = address;
            })
            .0
        })
    });
    // SAFETY: nothing uses it any more.
    assert!(in_context_of(stream, || unsafe { free(old, stream.as_raw()) }).is_success());
    synchronize(stream);
    settle(2 * STEPS * STEP);
    curve
}
