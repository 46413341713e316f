//! The steps of the curve, every 5 ms, while 32 GiB are given back and had again every 100 ms: another buffer of the same
//! resource, or memory of somebody else's, or nothing.
//!
//! # Safety
//! What is allocated here is used by nobody, and freed once.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm::{OnDrop, Options, Recycling, VirtualMemoryResource};
use cuvmm_tests::{RawBuffer, Times, in_context_of};

use crate::curve::{STEP, STEPS};
use crate::{Bench, settle, timed};

const OWN: &str = "grow-own-churn";
const FOREIGN: &str = "grow-foreign-churn";
const CHURNED: usize = 32 << 30;
const CHUNK: usize = 1 << 30;
const EACH_STEP: Duration = Duration::from_millis(5);
const EACH_CHURN: Duration = Duration::from_millis(100);
/// How often a buffer grows from nothing.
const ROUNDS: usize = 2;

pub(crate) fn run(bench: &mut Bench) {
    for case in [OWN, FOREIGN] {
        if !bench.wants(case) {
            continue;
        }
        let resource = bench.resource(Options::new().max_chunk(CHUNK));
        let (ours, raw) = (|| grow(&resource), || add(bench));
        let mut subjects: Vec<(&str, Times)> = Vec::new();
        subjects.push(("quiet", rounds(&ours)));
        if case == OWN {
            subjects.push(("cuvmm", beside(|| own(&resource), || rounds(&ours))));
            subjects.push(("cuvmm-deferred", deferred(bench)));
            subjects.push(("cuvmm-recycling", recycled(bench)));
            subjects.push(("raw", beside(|| raw_chunks(bench), || rounds(&raw))));
        } else {
            subjects.push(("cuvmm", beside(|| foreign(bench), || rounds(&ours))));
            subjects.push(("raw", beside(|| foreign(bench), || rounds(&raw))));
        }
        for (subject, times) in subjects {
            bench.rows.add(case, subject, &times);
        }
    }
}

/// The resource leaves what is dropped to the reaper, which gives it back a piece at a time.
fn deferred(bench: &Bench) -> Times {
    let resource = bench.resource(Options::new().max_chunk(CHUNK).on_drop(OnDrop::Defer));
    let times = beside(|| drop(resource.allocate(CHURNED).unwrap()), || rounds(&|| grow(&resource)));
    resource.drain(Instant::now() + Duration::from_secs(60)).unwrap();
    settle(CHURNED);
    times
}

/// The resource keeps all that either of its buffers closes.
fn recycled(bench: &Bench) -> Times {
    let recycling = Recycling::up_to(STEPS * STEP + CHURNED);
    let resource = bench.resource(Options::new().max_chunk(CHUNK).recycling(recycling));
    let times = beside(|| own(&resource), || rounds(&|| grow(&resource)));
    settle(resource.trim(0).unwrap());
    times
}

fn rounds(steps: &impl Fn() -> Vec<Duration>) -> Times {
    let times: Vec<Duration> = (0..ROUNDS).flat_map(|_| steps()).collect();
    Times::from_iter(times)
}

/// Does one thing on another thread, every 100 ms, while `measured` is done.
fn beside(churn: impl Fn() + Sync, measured: impl FnOnce() -> Times) -> Times {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut next = Instant::now();
            while !is_over.load(Ordering::Relaxed) {
                churn();
                next += EACH_CHURN;
                thread::sleep(next.saturating_duration_since(Instant::now()));
            }
        });
        let times = measured();
        is_over.store(true, Ordering::Relaxed);
        times
    })
}

/// The steps, each begun 5 ms after the one before it, or at once where that took longer.
fn steps(mut step: impl FnMut(usize) -> Duration) -> Vec<Duration> {
    let mut next = Instant::now();
    let each = |steps| {
        next += EACH_STEP;
        thread::sleep(next.saturating_duration_since(Instant::now()));
        step(steps * STEP)
    };
    (1..=STEPS).map(each).collect()
}

fn grow(resource: &VirtualMemoryResource) -> Vec<Duration> {
    let mut buffer = Some(resource.allocate_with_capacity(0, STEPS * STEP).unwrap());
    let times = steps(|size| {
        let (took, grown) = timed(|| buffer.take().unwrap().grow_into(size).unwrap());
        buffer = Some(grown);
        took
    });
    buffer.unwrap().close().unwrap();
    settle(STEPS * STEP);
    times
}

fn add(bench: &Bench) -> Vec<Duration> {
    let mut raw = RawBuffer::reserve(&bench.device, STEPS * STEP);
    let times = steps(|_| timed(|| raw.add(STEP)).0);
    raw.finish();
    settle(STEPS * STEP);
    times
}

/// A buffer of the resource's own, in chunks of 1 GiB.
fn own(resource: &VirtualMemoryResource) {
    resource.allocate(CHURNED).unwrap().close().unwrap();
}

fn raw_chunks(bench: &Bench) {
    let mut raw = RawBuffer::reserve(&bench.device, CHURNED);
    (0..CHURNED / CHUNK).for_each(|_| raw.add(CHUNK));
    raw.finish();
}

fn foreign(bench: &Bench) {
    let driver = bench.device.driver();
    in_context_of(&bench.stream, || {
        let address = driver.mem_alloc(CHURNED).unwrap();
        // SAFETY: nobody uses it.
        unsafe { driver.mem_free(address) }.unwrap();
    });
}
