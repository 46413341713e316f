//! What each operation asks of the driver and of the heap, as the README of cuvmm-resource says.
//!
//! # Safety
//! The counting allocator passes everything on to the system's.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cuvmm::driver::{Failure, Hook, Hooked, Invocation};
use cuvmm::{Driver, OnDrop, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::Nothing;

/// Where the numbers stand for readers. `cargo xtask shuttle` holds the column of locks.
const README: &str = include_str!("../../crates/cuvmm-resource/README.md");

/// The size of a chunk: that of the least reservation, which so has no room to spare.
const CHUNK: usize = 32 << 20;

/// What an operation took: calls of the driver, and allocations from the heap.
#[derive(Debug, PartialEq)]
struct Taken {
    calls: usize,
    allocations: usize,
}

/// What the row of the README says that begins so.
fn stated(operation: &str) -> Taken {
    let row = README.lines().find(|line| line.starts_with(&format!("| {operation} |")));
    let row = row.unwrap_or_else(|| panic!("the README has no row for {operation}"));
    let numbers: Vec<usize> = row.split('|').filter_map(|cell| cell.trim().parse().ok()).collect();
    let [calls, allocations, _locks] = numbers[..] else { panic!("{row}") };
    Taken { calls, allocations }
}

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

struct Calls;

impl Hook for Calls {
    fn before(&self, _: &Invocation<'_>) -> Option<Failure> {
        CALLS.set(CALLS.get() + 1);
        None
    }
}

/// There is one thread in the process that lets go of what is dropped: what is left to it is counted by one test at a time.
static LEAVING: Mutex<()> = Mutex::new(());

struct Bench {
    /// On a driver that is counted: what that costs is not.
    counted: VirtualMemoryResource,
    bare: VirtualMemoryResource,
}

impl Bench {
    fn new(driver: fn() -> Nothing) -> Self {
        Self::with(driver, Options::new())
    }

    fn with(driver: fn() -> Nothing, options: Options) -> Self {
        let resource = |driver: Driver| {
            let options = options.clone().release(Release::Caller);
            VirtualMemoryResource::new(&driver.device(0).unwrap(), options).unwrap()
        };
        let counted = resource(Driver::new(Hooked::new(driver(), Calls)).unwrap());
        Self { counted, bare: resource(Driver::new(driver()).unwrap()) }
    }

    /// Checks what `operation` takes, done to what `prepare` makes of a resource.
    #[track_caller]
    fn check<P, R>(&self, row: &str, prepare: impl Fn(&VirtualMemoryResource) -> P, operation: impl Fn(P) -> R) {
        assert_eq!(self.taken(prepare, operation), stated(row), "{row}");
    }

    /// Checks that `operation` takes as much as is stated of one chunk, done to a buffer that has many.
    #[track_caller]
    fn check_many<R>(&self, row: &str, count: usize, room: usize, operation: impl Fn(VirtualMemoryBuffer) -> R) {
        let taken = self.taken(|resource| chunks(resource, count, room), operation);
        assert_eq!(taken, stated(row), "{row}, {count} chunks");
    }

    fn taken<P, R>(&self, prepare: impl Fn(&VirtualMemoryResource) -> P, operation: impl Fn(P) -> R) -> Taken {
        let prepared = prepare(&self.counted);
        let before = CALLS.get();
        let result = operation(prepared);
        let calls = CALLS.get() - before;
        drop(result);

        let prepared = prepare(&self.bare);
        let before = ALLOCATIONS.get();
        let result = operation(prepared);
        let allocations = ALLOCATIONS.get() - before;
        drop(result);
        Taken { calls, allocations }
    }
}

/// A buffer of that many chunks, with room for some more.
fn chunks(resource: &VirtualMemoryResource, count: usize, room: usize) -> VirtualMemoryBuffer {
    let mut buffer = resource.allocate_with_capacity(CHUNK, (count + room) * CHUNK).unwrap();
    for chunk in 2..=count {
        buffer = buffer.grow_into(chunk * CHUNK).unwrap();
    }
    buffer
}

/// The buffer, and what it grows to.
fn grown(buffer: VirtualMemoryBuffer, size: usize, outcome: Outcome) -> [VirtualMemoryBuffer; 2] {
    let grown = buffer.grow(size).unwrap();
    assert_eq!(grown.outcome(), Some(outcome));
    [grown, buffer]
}

#[test]
fn operations_take_what_the_readme_says() {
    let _alone = LEAVING.lock();
    let bench = Bench::new(Nothing::granting);
    let one = |resource: &VirtualMemoryResource| chunks(resource, 1, 0);
    bench.check("`allocate`", Clone::clone, |resource| resource.allocate(CHUNK).unwrap());
    let in_place = |buffer| grown(buffer, 2 * CHUNK, Outcome::InPlace);
    bench.check("`grow`, in place", |resource| chunks(resource, 1, 1), in_place);
    bench.check("`grow`, in place, by a reservation behind", one, in_place);
    bench.check("`grow`, covered", one, |buffer| grown(buffer, CHUNK, Outcome::Covered));
    bench.check("`close`, the last of its memory", one, |buffer| buffer.close().unwrap());
    bench.check("`drop`, the last of its memory", one, drop);
    bench.check("`close_deferred`", after_another, VirtualMemoryBuffer::close_deferred);
    bench.check(
        "`close`, beside an alias",
        |resource| grown(one(resource), CHUNK, Outcome::Covered),
        |[alias, buffer]| {
            alias.close().unwrap();
            buffer
        },
    );
    let bench = Bench::new(Nothing::elsewhere);
    bench.check(
        "`grow`, moved, of 10 chunks",
        |resource| chunks(resource, 10, 0),
        |buffer| grown(buffer, 11 * CHUNK, Outcome::Moved),
    );
}

/// A buffer of one chunk, after another one of the resource's was left to the thread that is started for that, and is gone.
fn after_another(resource: &VirtualMemoryResource) -> VirtualMemoryBuffer {
    let [first, second] = [(); 2].map(|()| chunks(resource, 1, 0));
    first.close_deferred();
    resource.drain(Instant::now() + Duration::from_secs(30)).unwrap();
    second
}

#[test]
fn a_deferred_drop_takes_what_the_readme_says() {
    let _alone = LEAVING.lock();
    let bench = Bench::with(Nothing::granting, Options::new().on_drop(OnDrop::Defer));
    bench.check("`drop`, deferred", after_another, drop);
}

#[test]
fn what_a_grow_in_place_takes_does_not_depend_on_the_number_of_chunks() {
    let bench = Bench::new(Nothing::granting);
    for count in [1, 2, 10, 11, 12, 100, 1000, 10_000] {
        let in_place = |buffer| grown(buffer, (count + 1) * CHUNK, Outcome::InPlace);
        bench.check_many("`grow`, in place", count, 1, in_place);
        bench.check_many("`grow`, in place, by a reservation behind", count, 0, in_place);
        bench.check_many("`grow`, covered", count, 0, |buffer| grown(buffer, count * CHUNK, Outcome::Covered));
    }
}
