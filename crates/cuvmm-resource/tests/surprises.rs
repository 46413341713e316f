//! The reaper among surprises: owners of streams and subscribers that panic on its thread, drops while a thread unwinds, and a
//! driver that shuts down.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUstream_flags;
use cuvmm_driver::{CUresult, Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_resource::{Error, OnDrop, Options, Release, StreamRef, VirtualMemoryResource};
use cuvmm_sim::{Machine, Simulator, When};
use support::work::{Foreign, Held};
use support::{Bench, G};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const REAPER: &str = "cuvmm-reaper";

fn is_reaper() -> bool {
    thread::current().name() == Some(REAPER)
}

/// A panic that nobody is shown.
fn surprise() {
    resume_unwind(Box::new("a surprise"));
}

/// The subscriber of this process, which hears what the reaper tells. It panics the next times, as often as is asked for.
struct Listener;

static TOLD: AtomicUsize = AtomicUsize::new(0);
static PANICS: Mutex<Vec<Told>> = Mutex::new(Vec::new());

/// What the reaper tells.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    Span,
    Entered,
    Event,
}

impl Listener {
    fn hear(told: Told) {
        if !is_reaper() {
            return;
        }
        TOLD.fetch_add(1, Ordering::SeqCst);
        let mut panics = PANICS.lock().unwrap();
        let is_due = panics.pop_if(|due| *due == told).is_some();
        drop(panics);
        if is_due {
            surprise();
        }
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("cuvmm")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self::hear(Told::Span);
        Id::from_u64(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        Self::hear(Told::Event);
    }

    fn enter(&self, _: &Id) {
        Self::hear(Told::Entered);
    }

    fn exit(&self, _: &Id) {}
}

/// Listens to the reaper, which is one for all tests: one at a time.
fn listen() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    static LISTENS: Once = Once::new();
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    LISTENS.call_once(|| tracing::subscriber::set_global_default(Listener).unwrap());
    PANICS.lock().unwrap().clear();
    TOLD.store(0, Ordering::SeqCst);
    one
}

fn deferring(bench: &Bench) -> VirtualMemoryResource {
    bench.resource(Options::new().on_drop(OnDrop::Defer).release(Release::Caller))
}

#[track_caller]
fn drain(resource: &VirtualMemoryResource) {
    resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
}

/// A stream whose owner panics when it goes.
fn panicking(bench: &Bench) -> StreamRef {
    let owner = Foreign::new(bench, CUstream_flags::NON_BLOCKING);
    *owner.last.lock().unwrap() = Some(Box::new(surprise));
    StreamRef::from_owner(owner).unwrap()
}

/// As many owners as there may be: their panics don't meet.
#[test]
fn owners_that_panic_on_the_reapers_thread_strand_their_buffer_alone() {
    let _one = listen();
    for owners in [1, 2, 3] {
        for bench in Bench::presets() {
            let resource = deferring(&bench);
            let buffers = [(); 3].map(|()| resource.allocate(G).unwrap());
            for _ in 0..owners {
                buffers[1].fence(&panicking(&bench)).unwrap();
            }
            drop(buffers);
            drain(&resource);
            assert_eq!((resource.statistics().stranded, bench.driver.stranded().total()), (1, 1));
            drop(resource.allocate(G).unwrap());
            drain(&resource);
            // The one buffer, and what the owners had not yet given back.
            assert_eq!(bench.left(), [1, 1, 1, 0, owners, owners]);
            assert_eq!(bench.simulator.violations(), []);
        }
    }
}

/// Two whose work is not over, and one whose panic gives the buffer up.
#[test]
fn owners_of_busy_streams_that_panic_at_once_end_no_process() {
    let _one = listen();
    for bench in Bench::presets() {
        let resource = deferring(&bench);
        let buffer = resource.allocate(G).unwrap();
        let owners = [(); 3].map(|()| Foreign::new(&bench, CUstream_flags::NON_BLOCKING));
        let held = [&owners[0], &owners[1]].map(|owner| Held::queue(owner.stream, &buffer));
        for owner in owners {
            *owner.last.lock().unwrap() = Some(Box::new(surprise));
            buffer.fence(&StreamRef::from_owner(owner).unwrap()).unwrap();
        }
        drop(buffer);
        drain(&resource);
        assert_eq!((resource.statistics().stranded, bench.driver.stranded().total()), (1, 1));
        for held in held {
            held.let_go_soon().join().unwrap();
        }
        drop(resource.allocate(G).unwrap());
        drain(&resource);
        assert_eq!(bench.left(), [1, 1, 1, 0, 3, 3]);
        assert_eq!(bench.simulator.violations(), []);
    }
}

/// The memory is given back or stranded, and nothing stays pending.
#[test]
fn subscribers_that_panic_on_the_reapers_thread_cost_no_more_than_the_buffer() {
    let _one = listen();
    // Whether the memory is gone by then: what a release was is told after it.
    for (told, stranded) in [(Told::Span, 1), (Told::Entered, 1), (Told::Event, 0)] {
        for bench in Bench::presets() {
            let resource = deferring(&bench);
            PANICS.lock().unwrap().push(told);
            drop(resource.allocate(G).unwrap());
            drain(&resource);
            assert_eq!(*PANICS.lock().unwrap(), [], "{told:?}");
            drop(resource.allocate(G).unwrap());
            drain(&resource);
            assert_eq!(resource.statistics().stranded, stranded, "{told:?}");
            assert_eq!(bench.left(), [stranded, stranded, stranded, 0, 0, 0], "{told:?}");
        }
    }
}

/// That memory is given up is told when it is counted.
#[test]
fn a_subscriber_that_panics_where_memory_is_given_up_leaves_nothing_pending() {
    let _one = listen();
    let bench = Bench::small();
    let resource = deferring(&bench);
    let buffer = resource.allocate(G).unwrap();
    buffer.fence(&StreamRef::create(&bench.device()).unwrap()).unwrap();
    PANICS.lock().unwrap().push(Told::Event);
    bench.faults.fail_when(Call::cuEventQuery, |_| true, CUresult::UNKNOWN, When::Before);
    drop(buffer);
    drain(&resource);
    assert_eq!((resource.pending(), resource.statistics().stranded), (0, 1));
    // It is told last.
    bench.wait_until(|_| PANICS.lock().unwrap().is_empty());
}

#[test]
fn buffers_dropped_while_a_thread_unwinds_go() {
    let _one = listen();
    for on_drop in [OnDrop::Wait, OnDrop::Defer] {
        for bench in Bench::presets() {
            let resource = bench.resource(Options::new().on_drop(on_drop));
            let foreign = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(Release::Stream(StreamRef::from_owner(foreign.clone()).unwrap())).unwrap();
            let held = Held::queue(foreign.stream, &buffer).let_go_soon();
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                let _buffer = buffer;
                surprise();
            }));
            assert!(unwound.is_err());
            let is_gone = bench.left()[0] == 0;
            assert_eq!(is_gone, on_drop == OnDrop::Wait);
            drain(&resource);
            held.join().unwrap();
            drop((resource, foreign));
            bench.assert_clean_soon();
        }
    }
}

/// Counts calls, also those that a driver that has shut down refuses.
#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

impl Hook for Count {
    fn before(&self, _: &Invocation<'_>) -> Option<Failure> {
        self.0.fetch_add(1, Ordering::SeqCst);
        None
    }
}

/// The driver gave all back: nothing is pending any more, lost, or told.
#[test]
fn when_the_driver_shuts_down_the_reaper_asks_no_more_and_is_quiet() {
    let _one = listen();
    let (simulator, count) = (Simulator::new(Machine::small()), Count::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), count.clone())).unwrap();
    let bench = Bench { simulator, driver, faults: Default::default(), meanwhile: Default::default() };
    let resource = bench.resource(Options::new().on_drop(OnDrop::Defer));
    let foreign = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
    let stream = StreamRef::from_owner(foreign.clone()).unwrap();
    let make = || {
        let buffer = resource.allocate(G).unwrap();
        buffer.set_release(Release::Stream(stream.clone())).unwrap();
        buffer
    };
    let [on_stream, fenced, deferred, closed] = [(); 4].map(|()| make());
    let waits = bench.plain().allocate(G).unwrap();
    let held = Held::queue(foreign.stream, &on_stream);
    fenced.fence(&stream).unwrap();
    drop((on_stream, fenced));
    assert_eq!(resource.drain(Instant::now() + Duration::from_millis(20)), Err(Error::StillPending { buffers: 2 }));
    TOLD.store(0, Ordering::SeqCst);
    bench.simulator.shut_down();
    drain(&resource);
    assert_eq!(resource.pending(), 0);
    let calls = count.0.load(Ordering::SeqCst);
    thread::sleep(Duration::from_millis(30));
    assert_eq!(count.0.load(Ordering::SeqCst), calls, "it asks for more");

    drop(deferred);
    drain(&resource);
    drop(waits);
    let error = closed.close().unwrap_err();
    assert_eq!((error.error().code(), error.into_buffer().is_none()), (Some(CUresult::DEINITIALIZED), true));
    assert_eq!((resource.statistics().stranded, bench.driver.stranded().total()), (0, 0));
    assert_eq!(TOLD.load(Ordering::SeqCst), 0, "it tells of it");
    held.let_go_soon().join().unwrap();
    // Its owner is of those that say what they can't do.
    std::mem::forget((stream, foreign));
}
