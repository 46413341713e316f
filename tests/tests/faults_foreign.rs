//! Every driver call of taking over, giving back and wrapping what others made, made to fail: nothing is lost but what
//! the call itself made, and until the first unmap the range is whole and its owner's.
//!
//! # Safety
//! A range is the test's own, made by raw calls. It is given away once, or not at all where a call fails before the first
//! unmap; no work is on it.
#![allow(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::resource::Error;
use cuvmm::{CUresult, Call, DeallocateError, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::faults::When;
use cuvmm_tests::matrix;
use cuvmm_tests::{
    Backend, ForeignRange, G, Left, ROOM, Step, Stream, occupy_behind, require_marks, steps, write_marks,
};

cuvmm_tests::suite!(
    a_failed_call_of_taking_over_leaves_the_range_its_owners,
    what_a_call_of_taking_over_did_before_it_failed_is_all_that_is_lost,
    a_failed_call_of_deallocate_leaves_the_range_its_owners_until_the_first_unmap,
    a_wait_that_fails_leaves_the_range_its_owners_unless_the_work_is_over,
    a_failed_call_of_an_alias_leaves_nothing,
    a_failed_call_of_growing_what_was_taken_over_leaves_it_as_it_was,
);

/// The granules of the mappings of a range that has room behind them.
const GRANULES: [usize; 3] = [2, 1, 4];

fn range_of(backend: &Backend, granules: &[usize]) -> ForeignRange {
    ForeignRange::make(backend, backend.device.location(), granules, ROOM)
}

fn adopt(resource: &VirtualMemoryResource, range: &ForeignRange) -> Result<VirtualMemoryBuffer, Error> {
    // SAFETY: the range is the test's to give away.
    unsafe { resource.from_raw(range.address, range.size, Release::Caller) }
}

fn deallocate(resource: &VirtualMemoryResource, range: &ForeignRange, release: Release) -> Result<(), DeallocateError> {
    // SAFETY: the range is the test's to give away.
    unsafe { resource.deallocate(range.address, range.size, release) }
}

/// The calls of `work`, but for those that put an answer into words, whose failure changes no more than the words.
fn steps_of<T>(backend: &Backend, work: impl FnOnce() -> T) -> (Vec<Step>, T) {
    let (mut steps, result) = steps(backend, work);
    steps.retain(|step| !matches!(step.call, Call::cuGetErrorName | Call::cuGetErrorString));
    (steps, result)
}

/// The codes that a call is to fail with.
fn codes(backend: &Backend, call: Call) -> Vec<CUresult> {
    if backend.is_gpu() { matrix::sample(call) } else { matrix::codes(call) }
}

/// Lets one step of `work` fail, and nothing else.
#[track_caller]
fn with_fault<T>(backend: &Backend, step: Step, code: CUresult, when: When, work: impl FnOnce() -> T) -> T {
    let fired = backend.faults.fired();
    backend.faults.fail(step.call, step.nth, code, when);
    let result = work();
    backend.faults.clear();
    assert_eq!(backend.faults.fired(), fired + 1, "{step:?} was not called");
    result
}

/// Whether a failure says no more than that nothing is mapped somewhere.
fn is_no(step: Step, code: CUresult) -> bool {
    step.call == Call::cuMemRetainAllocationHandle && code == CUresult::INVALID_VALUE
}

/// Demands the error that a step failed with, or what that means.
#[track_caller]
fn require_told(step: Step, code: CUresult, error: &Error) {
    match error {
        Error::NotVmm { .. } | Error::MappedBehindHole { .. } => assert!(is_no(step, code), "{step:?}: {error}"),
        Error::HostCallback => assert_eq!((step.call, code), (Call::cuCtxGetCurrent, CUresult::NOT_PERMITTED)),
        error => assert_eq!((error.call(), error.code()), (Some(step.call), Some(code)), "{error}"),
    }
}

/// What a failing call leaves: what it took and nobody knows of, or did not give back.
fn left(call: Call, code: CUresult, when: When) -> Left {
    let none = Left::default();
    // Of a driver that has shut down nothing is counted.
    let stranded = usize::from(code != CUresult::DEINITIALIZED);
    match (call, when) {
        (Call::cuMemRelease, When::Before) => Left { allocations: 1, stranded, ..none },
        (Call::cuMemRelease, When::After) => Left { stranded, ..none },
        (Call::cuMemRetainAllocationHandle, When::After) => Left { allocations: 1, ..none },
        (Call::cuMemUnmap, When::Before) => Left { mappings: 1, reservations: 1, stranded, ..none },
        (Call::cuMemAddressFree, When::Before) => Left { reservations: 1, stranded, ..none },
        _ => none,
    }
}

fn a_failed_call_of_taking_over_leaves_the_range_its_owners(backend: &Backend) {
    let resource = backend.resource();
    let range = range_of(backend, &GRANULES);
    let (steps, buffer) = steps_of(backend, || adopt(&resource, &range).unwrap());
    buffer.close().unwrap();
    for step in steps {
        for code in codes(backend, step.call) {
            let mark = backend.mark();
            let range = range_of(backend, &GRANULES);
            match with_fault(backend, step, code, When::Before, || adopt(&resource, &range)) {
                Ok(buffer) => {
                    assert!(is_no(step, code), "{step:?} failed with {code}, and nothing noticed");
                    assert_eq!(buffer.size(), range.mapped());
                    buffer.close().unwrap();
                }
                Err(error) => {
                    require_told(step, code, &error);
                    range.take_down();
                }
            }
            backend.require_left(&mark, left(step.call, code, When::Before));
        }
    }
}

fn what_a_call_of_taking_over_did_before_it_failed_is_all_that_is_lost(backend: &Backend) {
    let resource = backend.resource();
    // Without a hole, so that every question is answered with yes.
    let make = || range_of(backend, &[2, 1, 13]);
    let range = make();
    let (steps, buffer) = steps_of(backend, || adopt(&resource, &range).unwrap());
    buffer.close().unwrap();
    for step in steps {
        let mark = backend.mark();
        let range = make();
        let error = with_fault(backend, step, CUresult::UNKNOWN, When::After, || adopt(&resource, &range)).unwrap_err();
        require_told(step, CUresult::UNKNOWN, &error);
        range.take_down();
        backend.require_left(&mark, left(step.call, CUresult::UNKNOWN, When::After));
    }
}

fn a_failed_call_of_deallocate_leaves_the_range_its_owners_until_the_first_unmap(backend: &Backend) {
    let resource = backend.resource();
    let range = range_of(backend, &GRANULES);
    let (steps, ()) = steps_of(backend, || deallocate(&resource, &range, Release::Caller).unwrap());
    let first_unmap = steps.iter().position(|step| step.call == Call::cuMemUnmap).unwrap();
    for (index, step) in steps.iter().copied().enumerate() {
        for code in codes(backend, step.call) {
            let mark = backend.mark();
            let range = range_of(backend, &GRANULES);
            let result =
                with_fault(backend, step, code, When::Before, || deallocate(&resource, &range, Release::Caller));
            let Err(error) = result else {
                assert!(is_no(step, code), "{step:?} failed with {code}, and nothing noticed");
                backend.require_unchanged(&mark);
                continue;
            };
            require_told(step, code, error.error());
            // The question whether this is a host function is asked once more, before the wait: what fails there but for a
            // no does not keep anything.
            let is_settling = step.call == Call::cuCtxGetCurrent && step.nth == 2;
            let expect = index >= first_unmap || is_settling && code != CUresult::NOT_PERMITTED;
            assert_eq!(error.is_deallocated(), expect, "{step:?} failed with {code}: {error}");
            if !error.is_deallocated() {
                range.take_down();
            }
            backend.require_left(&mark, left(step.call, code, When::Before));
        }
    }
}

fn a_wait_that_fails_leaves_the_range_its_owners_unless_the_work_is_over(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    for (code, is_over) in [
        (CUresult::UNKNOWN, false),
        (CUresult::OUT_OF_MEMORY, false),
        (CUresult::ILLEGAL_ADDRESS, true),
        (CUresult::CONTEXT_IS_DESTROYED, true),
    ] {
        let mark = backend.mark();
        let range = range_of(backend, &GRANULES);
        let step = Step { call: Call::cuStreamSynchronize, nth: 1 };
        let release = Release::Stream(stream.clone());
        let result = with_fault(backend, step, code, When::Before, || deallocate(&resource, &range, release));
        let error = result.unwrap_err();
        require_told(step, code, error.error());
        assert_eq!(error.is_deallocated(), is_over, "{code}");
        if !is_over {
            deallocate(&resource, &range, Release::Stream(stream.clone())).unwrap();
        }
        backend.require_unchanged(&mark);
    }
}

fn a_failed_call_of_an_alias_leaves_nothing(backend: &Backend) {
    let resource = backend.resource();
    let range = range_of(backend, &GRANULES);
    // SAFETY: the memory is the test's, which refers to nothing in it.
    let wrap = |range: &ForeignRange| unsafe { resource.wrap(range.address, range.mapped()) };
    let (steps, alias) = steps_of(backend, || wrap(&range).unwrap());
    alias.close().unwrap();
    range.take_down();
    for step in steps {
        for code in codes(backend, step.call) {
            let mark = backend.mark();
            let range = range_of(backend, &GRANULES);
            let error = with_fault(backend, step, code, When::Before, || wrap(&range)).unwrap_err();
            require_told(step, code, &error);
            range.take_down();
            backend.require_left(&mark, left(step.call, code, When::Before));
        }
    }
}

fn a_failed_call_of_growing_what_was_taken_over_leaves_it_as_it_was(backend: &Backend) {
    let resource = VirtualMemoryResource::new(&backend.device, Options::new()).unwrap();
    for (granules, outcome) in [([2, 1, 4], Outcome::InPlace), ([2, 1, 13], Outcome::Moved)] {
        let range = range_of(backend, &granules);
        let buffer = adopt(&resource, &range).unwrap();
        write_marks(&buffer, 2);
        let occupied = occupy_behind(&buffer);
        let larger = buffer.size() + G;
        let (mut steps, grown) = steps_of(backend, || buffer.grow(larger).unwrap());
        assert_eq!(grown.outcome(), Some(outcome));
        grown.close().unwrap();
        // Where the addresses behind can't be had, whatever the reason, it moves.
        let is_behind = |step: &Step| {
            step.call == Call::cuMemAddressFree || step.call == Call::cuMemAddressReserve && step.nth == 1
        };
        steps.retain(|step| !is_behind(step));
        for step in steps {
            for code in codes(backend, step.call) {
                let mark = backend.mark();
                let error = with_fault(backend, step, code, When::Before, || buffer.grow(larger)).unwrap_err();
                require_told(step, code, &error);
                backend.require_unchanged(&mark);
                require_marks(&buffer, 2, range.mapped());
            }
        }
        buffer.close().unwrap();
        drop(occupied);
    }
    backend.require_all_gone();
}
