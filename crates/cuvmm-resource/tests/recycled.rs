//! What is kept, among surprises: hooks, subscribers and owners that panic while a chunk comes or goes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cuvmm_driver::{Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_resource::{Options, Outcome, Recycling, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, Simulator};
use support::work::drain;
use support::{Bench, R};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const GIB: usize = 1 << 30;

/// A panic that nobody is shown.
fn surprise() {
    resume_unwind(Box::new("a surprise"));
}

/// The reaper is one for all tests, and has a look at all that is kept when it has one at any.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[track_caller]
fn require_panic(work: impl FnOnce()) {
    catch_unwind(AssertUnwindSafe(work)).unwrap_err();
}

fn recycling(bytes: usize) -> Options {
    Options::new().release(Release::Caller).recycling(Recycling::up_to(bytes))
}

/// It may be mapped there still: whoever had it next would share it.
#[test]
fn memory_whose_unmap_somebody_panicked_over_is_not_kept() {
    let _one = one_at_a_time();
    for drops in [false, true] {
        let bench = Bench::small();
        let resource = bench.resource(recycling(GIB));
        let buffer = resource.allocate(R).unwrap();
        // What is behind it is another alias's, so that it moves.
        let behind = buffer.grow(2 * R).unwrap();
        let moved = buffer.grow(3 * R).unwrap();
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        behind.close().unwrap();
        bench.meanwhile.before_next(Call::cuMemUnmap, surprise);
        require_panic(|| if drops { drop(buffer) } else { buffer.close().unwrap() });
        moved.close().unwrap();
        assert_eq!((bench.simulator.live().mappings, resource.statistics().kept.now), (1, 3 * R), "drops: {drops}");
        assert_eq!(bench.simulator.violations(), []);
    }
}

#[test]
fn what_a_resource_kept_goes_though_somebody_panics_in_the_midst() {
    let _one = one_at_a_time();
    let bench = Bench::new(Machine::h200());
    let resource = bench.resource(recycling(32 * GIB).max_chunk(GIB));
    resource.allocate(8 * GIB).unwrap().close().unwrap();
    bench.meanwhile.before_next(Call::cuMemRelease, surprise);
    drop(resource);
    // What it was panicked over is nobody's any more.
    bench.wait_until(|bench| bench.left()[2] == 1);
    assert!(bench.meanwhile.is_over());
    assert_eq!(bench.simulator.violations(), []);
}

/// How often it is still a surprise that memory is trimmed, and how often it was.
static SURPRISES: AtomicUsize = AtomicUsize::new(0);
static MET: AtomicUsize = AtomicUsize::new(0);

/// The subscriber of this process.
struct Panicking;

impl Subscriber for Panicking {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.name() == "trim"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        if SURPRISES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            MET.fetch_add(1, Ordering::Relaxed);
            surprise();
        }
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Each of its chunks is too much for the budget, and each is to be told of: a second panic would end the process.
#[test]
fn a_subscriber_that_panics_over_each_chunk_that_goes_ends_no_process() {
    let _one = one_at_a_time();
    tracing::subscriber::set_global_default(Panicking).unwrap();
    for drops in [false, true] {
        let bench = Bench::small();
        let resource = bench.resource(recycling(R).max_chunk(R));
        let buffer = resource.allocate(5 * R).unwrap();
        MET.store(0, Ordering::Relaxed);
        SURPRISES.store(4, Ordering::Relaxed);
        require_panic(|| if drops { drop(buffer) } else { buffer.close().unwrap() });
        assert_eq!((MET.load(Ordering::Relaxed), SURPRISES.swap(0, Ordering::Relaxed)), (1, 3));
        let statistics = resource.statistics();
        assert_eq!((statistics.kept.now, statistics.physical.now, statistics.trimmed), (R, R, 4));
        drop(resource);
        bench.assert_clean_soon();
    }
}

/// A hook that panics when its driver goes, and lets the first release wait until it is told.
struct Last {
    may_release: Mutex<Option<Receiver<()>>>,
    is_gone: Arc<AtomicBool>,
}

impl Hook for Last {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        if invocation.call == Call::cuMemRelease
            && let Some(told) = self.may_release.lock().unwrap().take()
        {
            told.recv().unwrap();
        }
        None
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        self.is_gone.store(true, Ordering::Release);
        surprise();
    }
}

/// What goes last is what was kept: with it goes the driver, on the thread that has to serve all others.
#[test]
fn a_hook_that_panics_where_what_was_kept_was_the_last_of_its_driver_ends_no_thread() {
    let _one = one_at_a_time();
    let is_gone = Arc::new(AtomicBool::new(false));
    let (tells, told) = channel();
    let hook = Last { may_release: Mutex::new(Some(told)), is_gone: Arc::clone(&is_gone) };
    let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), hook)).unwrap();
    let resource = VirtualMemoryResource::new(&driver.device(0).unwrap(), recycling(GIB)).unwrap();
    drop(driver);
    resource.allocate(R).unwrap().close().unwrap();
    drop(resource);
    tells.send(()).unwrap();
    while !is_gone.load(Ordering::Acquire) {
        thread::sleep(Duration::from_micros(100));
    }
    let bench = Bench::small();
    let resource = bench.plain();
    resource.allocate(R).unwrap().close_deferred();
    drain(&resource);
}

/// Leaves them to the reaper one after the other, each when it lets go of the one before. Tells each time how many allocations
/// there are beside theirs.
fn in_a_row(bench: Arc<Bench>, mut buffers: Vec<VirtualMemoryBuffer>, others: Arc<Mutex<Vec<usize>>>) {
    let Some(next) = buffers.pop() else { return };
    others.lock().unwrap().push(bench.left()[2] - buffers.len() - 1);
    let meanwhile = bench.meanwhile.clone();
    meanwhile.before_next(Call::cuMemUnmap, move || in_a_row(bench, buffers, others));
    next.close_deferred();
}

#[test]
fn what_a_resource_kept_goes_also_where_each_round_has_enough_to_do_without() {
    let _one = one_at_a_time();
    let bench = Arc::new(Bench::new(Machine::h200()));
    let keeping = bench.resource(recycling(GIB));
    keeping.allocate(GIB).unwrap().close().unwrap();
    let resource = bench.resource(Options::new().release(Release::Caller));
    let mut buffers: Vec<_> = (0..20).map(|_| resource.allocate(GIB).unwrap()).collect();
    let (inner, last) = (Arc::clone(&bench), buffers.pop().unwrap());
    let others = Arc::<Mutex<Vec<usize>>>::default();
    let told = Arc::clone(&others);
    bench.meanwhile.before_next(Call::cuMemUnmap, move || {
        drop(keeping);
        in_a_row(inner, buffers, told);
    });
    last.close_deferred();
    drain(&resource);
    drop(resource);
    bench.assert_clean_soon();
    let others = others.lock().unwrap();
    // What goes just then, and what was kept.
    assert_eq!((others.len(), others.first()), (19, Some(&2)));
    let rounds = others.iter().position(|others| *others == 1);
    assert!(rounds.is_some_and(|rounds| rounds < 5), "{others:?}");
}
