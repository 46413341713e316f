//! What the reaper makes of what it was left, where several things come together.
//!
//! # Safety
//! Graphs, contexts and streams are the test's own, and used by nobody else.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::{CUdevice, CUstream_flags};
use cuvmm_driver::{CUresult, Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_resource::{Error, OnDrop, Options, Release, StreamRef, VirtualMemoryResource};
use cuvmm_sim::When;
use support::work::{Foreign, Held};
use support::{Bench, G};

#[track_caller]
fn drain(resource: &VirtualMemoryResource) {
    resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
}

/// A resource whose buffers wait for nothing but their fences.
fn unattended(bench: &Bench) -> VirtualMemoryResource {
    bench.resource(Options::new().on_drop(OnDrop::Defer).release(Release::Caller))
}

/// A stream whose owner does that when it is dropped.
fn owned(bench: &Bench, last: impl FnOnce() + Send + 'static) -> StreamRef {
    let owner = Foreign::new(bench, CUstream_flags::NON_BLOCKING);
    *owner.last.lock().unwrap() = Some(Box::new(last));
    StreamRef::from_owner(owner).unwrap()
}

fn surprise() {
    resume_unwind(Box::new("a surprise"));
}

/// Keeps the reaper from looking at anything until it is dropped, so that it finds all together what it is left meanwhile.
fn occupied() -> Sender<()> {
    let bench = Bench::small();
    let (begun, has_begun) = channel();
    let (sender, receiver) = channel::<()>();
    let stream = owned(&bench, move || {
        begun.send(()).unwrap();
        let _ = receiver.recv_timeout(Duration::from_secs(20));
    });
    let buffer = unattended(&bench).allocate(G).unwrap();
    buffer.set_release(Release::Stream(stream)).unwrap();
    drop(buffer);
    has_begun.recv().unwrap();
    sender
}

/// What a graph had waits for nothing, and knows of no default stream.
#[test]
fn what_a_graph_had_waits_for_the_default_stream_once_a_buffer_of_the_same_memory_is_left_with_it() {
    for bench in Bench::presets() {
        let resource = bench.plain();
        let buffer = resource.allocate(G).unwrap();
        let graph = bench.driver.graph_create().unwrap();
        // SAFETY: the graph is this test's.
        unsafe { buffer.retain_in_graph(graph) }.unwrap();
        let stream = Foreign::new(&bench, CUstream_flags::DEFAULT);
        let held = Held::queue(stream.stream, &buffer);

        let occupied = occupied();
        // SAFETY: the graph is this test's, and was never run.
        unsafe { bench.driver.graph_destroy(graph) }.unwrap();
        bench.wait_until(|_| resource.statistics().in_graphs == 0);
        buffer.close_deferred();
        assert_eq!(resource.pending(), 2);
        // What there is to wait for can't be found out at once.
        bench.faults.fail(Call::cuDevicePrimaryCtxRetain, 1, CUresult::UNKNOWN, When::Before);
        bench.simulator.clear_calls();
        drop(occupied);
        bench.wait_until(|bench| bench.count(Call::cuEventQuery) + bench.count(Call::cuMemUnmap) > 0);
        assert_eq!((bench.faults.fired(), bench.count(Call::cuMemUnmap)), (1, 0));

        drop(held);
        drain(&resource);
        drop((resource, stream));
        bench.assert_clean_soon();
    }
}

#[test]
fn of_what_is_left_together_nothing_is_given_back_that_went_with_its_context() {
    let bench = Bench::small();
    let resource = unattended(&bench);
    let buffer = resource.allocate(G).unwrap();
    let alias = buffer.grow(G).unwrap();
    let stream = StreamRef::create(&bench.device()).unwrap();
    buffer.fence(&stream).unwrap();
    alias.fence(&stream).unwrap();
    let occupied = occupied();
    drop((buffer, alias));
    // SAFETY: a number alone; nothing runs.
    assert_eq!(unsafe { bench.driver.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }, CUresult::SUCCESS);
    drop(occupied);
    drain(&resource);
    drop((stream, resource));
    assert_eq!((bench.simulator.live().mappings, bench.simulator.violations()), (0, vec![]));
}

#[test]
fn owners_that_panic_together_end_neither_the_process_nor_the_reaper() {
    let bench = Bench::small();
    let occupied = occupied();
    for _ in 0..2 {
        let release = Release::Stream(owned(&bench, surprise));
        drop(bench.resource(Options::new().on_drop(OnDrop::Defer).release(release)));
    }
    let resource = unattended(&bench);
    let buffer = resource.allocate(G).unwrap();
    for _ in 0..2 {
        buffer.fence(&owned(&bench, surprise)).unwrap();
    }
    drop((buffer, occupied));
    drain(&resource);
    assert_eq!(resource.statistics().stranded, 1, "the memory whose fences panicked");
    drop(resource.allocate(G).unwrap());
    drain(&resource);
    assert_eq!((bench.simulator.live().mappings, bench.simulator.violations()), (1, vec![]));
}

#[test]
fn what_a_driver_lacks_for_a_moment_strands_nothing() {
    let bench = Bench::small();
    let resource = unattended(&bench);
    let buffer = resource.allocate(G).unwrap();
    buffer.set_release(Release::Stream(StreamRef::create(&bench.device()).unwrap())).unwrap();
    let start = Instant::now();
    let is_short = move |_: &[u64]| start.elapsed() < Duration::from_millis(50);
    bench.faults.fail_when(Call::cuEventCreate, is_short, CUresult::OUT_OF_MEMORY, When::Before);
    drop(buffer);
    drain(&resource);
    assert!(bench.faults.fired() > 8, "{:?}", bench.faults);
    drop(resource);
    bench.assert_clean_soon();
}

#[test]
fn failures_that_are_far_between_strand_nothing_however_many_there_are() {
    const MANY: usize = 150;
    let bench = Bench::small();
    let resource = unattended(&bench);
    let buffer = resource.allocate(G).unwrap();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let held = Held::queue(stream.as_raw(), &buffer);
    buffer.fence(&stream).unwrap();
    let asked = AtomicUsize::new(0);
    let is_third = move |_: &[u64]| asked.fetch_add(1, Ordering::Relaxed) % 3 == 2;
    bench.faults.fail_when(Call::cuEventQuery, is_third, CUresult::UNKNOWN, When::Before);
    drop(buffer);
    bench.wait_until(|bench| bench.faults.fired() >= MANY);
    assert_eq!(resource.pending(), 1);
    drop(held);
    drain(&resource);
    drop((stream, resource));
    bench.assert_clean_soon();
}

/// The fence is used up by then: whoever waits for the rest is told.
#[test]
fn an_error_of_work_is_told_although_other_work_was_not_over_by_the_deadline() {
    for is_closed in [true, false] {
        let bench = Bench::small();
        let resource = bench.resource(Options::new().release(Release::Caller));
        let buffer = resource.allocate(G).unwrap();
        let [failing, stream] = [(); 2].map(|()| StreamRef::create(&bench.device()).unwrap());
        buffer.fence(&failing).unwrap();
        let held = Held::queue(stream.as_raw(), &buffer);
        buffer.fence(&stream).unwrap();
        bench.faults.fail(Call::cuEventQuery, 1, CUresult::ILLEGAL_ADDRESS, When::Before);
        let (error, buffer) = buffer.close_within(Instant::now()).unwrap_err().into_parts();
        assert_eq!(error, Error::DeadlinePassed);
        drop(held);
        let buffer = buffer.unwrap();
        let told =
            if is_closed { buffer.close() } else { buffer.close_within(Instant::now() + Duration::from_secs(20)) };
        assert_eq!(told.unwrap_err().error().code(), Some(CUresult::ILLEGAL_ADDRESS));
        drop((failing, stream, resource));
        bench.assert_clean_soon();
    }
}

/// Its stream is another thread's to end.
#[test]
fn an_empty_buffer_that_is_dropped_deferred_makes_no_call() {
    let bench = Bench::small();
    let resource = unattended(&bench);
    let buffer = resource.allocate(0).unwrap();
    buffer.set_release(Release::Stream(StreamRef::create(&bench.device()).unwrap())).unwrap();
    let occupied = occupied();
    bench.simulator.clear_calls();
    drop((buffer, resource));
    bench.assert_no_call();
    drop(occupied);
    bench.assert_clean_soon();
}

/// How often each event was asked for.
#[derive(Clone, Default)]
struct Questions(Arc<Mutex<BTreeMap<u64, usize>>>);

impl Hook for Questions {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        if invocation.call == Call::cuEventQuery {
            *self.0.lock().unwrap().entry(invocation.arguments[0]).or_default() += 1;
        }
        None
    }
}

/// A later record is not over before. That of the earliest is asked for in every round, and few others.
#[test]
fn of_many_buffers_behind_one_stream_hardly_more_than_one_is_asked_for() {
    const BUFFERS: usize = 200;
    let (bench, questions) = (Bench::small(), Questions::default());
    let driver = Driver::new(Hooked::new(bench.simulator.clone(), questions.clone())).unwrap();
    let device = driver.device(0).unwrap();
    let stream = StreamRef::create(&device).unwrap();
    let options = Options::new().on_drop(OnDrop::Defer).release(Release::Stream(stream.clone()));
    let resource = VirtualMemoryResource::new(&device, options).unwrap();
    let buffers: Vec<_> = (0..BUFFERS).map(|_| resource.allocate(G).unwrap()).collect();
    let held = Held::queue(stream.as_raw(), &buffers[0]);
    drop(buffers);
    let asked = || questions.0.lock().unwrap().values().copied().max().unwrap_or_default();
    bench.wait_until(|bench| bench.simulator.live().events == BUFFERS && asked() > 30);
    let (rounds, sum) = (asked(), questions.0.lock().unwrap().values().sum::<usize>());
    assert!(sum < 2 * BUFFERS + 20 * rounds, "{sum} questions in {rounds} rounds");
    drop(held);
    drain(&resource);
    drop((resource, stream));
    bench.assert_clean_soon();
}
