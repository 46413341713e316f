//! What nobody waits for goes a piece at a time, so that others get through in between.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::mpsc;

use cuvmm_driver::{CUresult, Call};
use cuvmm_resource::{Options, Recycling, Release, VirtualMemoryResource};
use cuvmm_sim::{Machine, When};
use support::Bench;
use support::work::drain;

const GIB: usize = 1 << 30;
const CHUNKS: usize = 8;

fn in_gibs(bench: &Bench) -> VirtualMemoryResource {
    bench.resource(Options::new().release(Release::Caller).max_chunk(GIB))
}

/// Leaves something large to the reaper, and a small buffer once that has come to the first such call. How many of those were
/// made until the small one was gone.
fn made_until_a_small_one_is_gone(bench: &Bench, call: Call, leave_large: impl FnOnce()) -> usize {
    let resource = in_gibs(bench);
    let small = resource.allocate(2 << 20).unwrap();
    bench.simulator.clear_calls();
    bench.meanwhile.before_next(call, move || small.close_deferred());
    leave_large();
    drop(resource);
    bench.assert_clean_soon();
    let calls = bench.simulator.calls();
    let freed = calls.iter().position(|made| *made == Call::cuMemAddressFree).unwrap();
    calls[..freed].iter().filter(|made| **made == call).count()
}

#[test]
fn what_is_small_goes_between_the_pieces_of_what_is_large() {
    let bench = Bench::new(Machine::h200());
    let large = in_gibs(&bench).allocate(CHUNKS * GIB).unwrap();
    let unmapped = made_until_a_small_one_is_gone(&bench, Call::cuMemUnmap, || large.close_deferred());
    assert!(unmapped <= 3, "after {unmapped} of {CHUNKS}");
}

#[test]
fn what_is_small_goes_between_the_pieces_of_what_a_resource_kept() {
    let bench = Bench::new(Machine::h200());
    let recycling = Options::new().release(Release::Caller).max_chunk(GIB).recycling(Recycling::up_to(32 * GIB));
    let keeping = bench.resource(recycling);
    keeping.allocate(CHUNKS * GIB).unwrap().close().unwrap();
    let released = made_until_a_small_one_is_gone(&bench, Call::cuMemRelease, || drop(keeping));
    assert!(released <= 3, "after {released} of {CHUNKS}");
}

#[test]
fn whoever_lacks_memory_goes_on_when_one_piece_is_there() {
    let bench = Bench::new(Machine::h200().device_memory(CHUNKS * GIB));
    let resource = in_gibs(&bench);
    let large = resource.allocate(CHUNKS * GIB).unwrap();
    bench.simulator.clear_calls();
    let (simulator, meanwhile) = (bench.simulator.clone(), bench.meanwhile.clone());
    let (allocated, is_allocated) = mpsc::channel();
    bench.meanwhile.before_next(Call::cuMemRelease, move || {
        while !simulator.calls().contains(&Call::cuMemCreate) {
            std::thread::yield_now();
        }
        // The first piece goes; the second does when the memory of the first is in use again.
        meanwhile.before_next(Call::cuMemRelease, move || is_allocated.recv().unwrap());
    });
    large.close_deferred();
    let next = resource.allocate(GIB).unwrap();
    allocated.send(()).unwrap();
    drain(&resource);
    drop((next, resource));
    bench.assert_clean_soon();
}

#[test]
fn one_chunk_that_is_larger_than_a_piece_goes_as_well() {
    let bench = Bench::new(Machine::h200());
    let resource = bench.resource(Options::new().release(Release::Caller));
    resource.allocate(5 * GIB).unwrap().grow_into(9 * GIB).unwrap().close_deferred();
    drain(&resource);
    drop(resource);
    bench.assert_clean();
}

#[test]
fn a_failure_in_one_piece_strands_that_and_the_others_go() {
    let bench = Bench::new(Machine::h200());
    let resource = in_gibs(&bench);
    let buffer = resource.allocate(CHUNKS * GIB).unwrap();
    bench.faults.fail(Call::cuMemUnmap, 3, CUresult::UNKNOWN, When::Before);
    buffer.close_deferred();
    drain(&resource);
    let live = bench.simulator.live();
    assert_eq!((live.mappings, live.reservations, live.allocations), (1, 1, 0));
    assert_eq!((resource.statistics().stranded, bench.simulator.violations()), (1, vec![]));
}

#[test]
fn what_somebody_panics_over_in_the_midst_is_stranded_and_ends_nothing_else() {
    let bench = Bench::new(Machine::h200());
    let resource = in_gibs(&bench);
    let buffer = resource.allocate(CHUNKS * GIB).unwrap();
    let meanwhile = bench.meanwhile.clone();
    bench.meanwhile.before_next(Call::cuMemUnmap, move || {
        meanwhile.before_next(Call::cuMemUnmap, || std::panic::resume_unwind(Box::new("by somebody else")));
    });
    buffer.close_deferred();
    drain(&resource);
    let live = bench.simulator.live();
    assert_eq!((live.mappings, live.allocations, live.reservations), (CHUNKS - 1, CHUNKS - 2, 1));
    assert_eq!(resource.statistics().stranded, 1, "what was left of it");
    let next = resource.allocate(3 * GIB).unwrap();
    next.close_deferred();
    drain(&resource);
    assert_eq!((bench.simulator.live().mappings, bench.simulator.violations()), (CHUNKS - 1, vec![]));
}

#[test]
fn what_others_share_is_theirs_when_the_rest_is_gone() {
    let bench = Bench::new(Machine::h200());
    let resource = in_gibs(&bench);
    let first = resource.allocate_with_capacity(2 * GIB, 16 * GIB).unwrap();
    first.copy_from_host(GIB, b"kept").unwrap();
    first.grow(6 * GIB).unwrap().close_deferred();
    drain(&resource);
    assert_eq!(bench.simulator.live().mappings, 2);
    let mut bytes = [0; 4];
    first.copy_to_host(GIB, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kept");
    first.close_deferred();
    drain(&resource);
    drop(resource);
    bench.assert_clean_soon();
}
