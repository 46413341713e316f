//! A buffer that grows to 63 GiB by 256 MiB a step: ours, by the driver's virtual memory calls, and by allocating, copying and
//! freeing.
//!
//! # Safety
//! What the driver's calls name was made just before, is used by nobody else, and goes once; each waits for what was queued.
#![allow(unsafe_code)]

use std::time::Duration;

use cuvmm::driver::sys::{CUdeviceptr, CUstream};
use cuvmm::{CUresult, Options, StreamRef, VirtualMemoryBuffer};
use cuvmm_tests::{MIB, RawBuffer, Times, in_context_of, is_gpu_benched, synchronize};

use crate::{Bench, settle, timed};

const CASE: &str = "grow-curve-63gib";
pub(crate) const STEP: usize = 256 * MIB;
pub(crate) const STEPS: usize = 252;
/// How often the curves of ours and of the driver's calls are run, side by side: that round counts whose total is the middle
/// one.
const ROUNDS: usize = 7;

/// How long each step took, and the most memory that was in use.
struct Curve {
    times: Times,
    peak: usize,
}

pub(crate) fn run(bench: &mut Bench) {
    if !bench.wants(CASE) {
        return;
    }
    let peaks = [by_growing(bench).peak, by_virtual_memory(bench).peak];
    let mut rounds: Vec<[Times; 2]> = (0..ROUNDS).map(|round| side_by_side(bench, round)).collect();
    rounds.sort_by_key(|round| round.iter().map(Times::total).sum::<Duration>());
    let middle = rounds.swap_remove(rounds.len() / 2);
    for ((subject, times), peak) in ["cuvmm", "raw"].into_iter().zip(middle).zip(peaks) {
        add(bench, subject, Curve { times, peak });
    }
    if is_gpu_benched() {
        // A simulator copies in the host's memory, of which there may not be so much; and it has no pools.
        let (copied, pooled) = (by_copying(bench), by_pool(bench));
        add(bench, "copy", copied);
        add(bench, "pool", pooled);
    }
}

fn add(bench: &mut Bench, subject: &str, curve: Curve) {
    bench.rows.add_with_peak(CASE, subject, &curve.times, curve.peak);
}

/// Makes memory once. The first that is made after so much was released takes 12 to 20 ms, whoever makes it (measured), also a
/// second later: that is no step's.
fn make_first(bench: &Bench) {
    let mut first = RawBuffer::reserve(&bench.device, STEP);
    first.add(STEP);
    first.finish();
    settle(STEP);
}

/// Does each step, and looks after it how much memory is in use that was not before.
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
    Curve { times: times.collect(), peak }
}

/// One buffer that grows.
struct Growing(Option<VirtualMemoryBuffer>);

impl Growing {
    fn begin(bench: &Bench) -> Self {
        Self(Some(bench.resource(Options::new()).allocate_with_capacity(0, STEPS * STEP).unwrap()))
    }

    fn step(&mut self, size: usize) -> Duration {
        let (took, grown) = timed(|| self.0.take().unwrap().grow_into(size).unwrap());
        self.0 = Some(grown);
        took
    }

    fn close(self) {
        self.0.unwrap().close().unwrap();
    }
}

fn by_growing(bench: &Bench) -> Curve {
    let mut buffer = Growing::begin(bench);
    let curve = steps(bench, |size| buffer.step(size));
    buffer.close();
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

/// Both of those at once, whose steps take turns, each as often the first: the same curve takes the driver a third longer one
/// time than another, whoever asks for it (measured), and so both.
fn side_by_side(bench: &Bench, round: usize) -> [Times; 2] {
    make_first(bench);
    let (mut buffer, mut raw) = (Growing::begin(bench), RawBuffer::reserve(&bench.device, STEPS * STEP));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for step in 1..=STEPS {
        let mut grow = || ours.push(buffer.step(step * STEP));
        let mut add = || theirs.push(timed(|| raw.add(STEP)).0);
        if (round + step).is_multiple_of(2) {
            grow();
            add();
        } else {
            add();
            grow();
        }
    }
    buffer.close();
    raw.finish();
    settle(2 * STEPS * STEP);
    [ours, theirs].map(Times::from_iter)
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
