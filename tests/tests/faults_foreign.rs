//! A wait for the work on a range of others that fails: the range goes only where that work is over. That each failing call
//! is told, and what it leaves, is the fault matrix's matter.
//!
//! # Safety
//! A range is the test's own, made by raw calls, and given away until the driver takes it; no work is on it.
#![allow(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::{CUresult, Call, DeallocateError, Release, StreamRef, VirtualMemoryResource};
use cuvmm_sim::faults::When;
use cuvmm_tests::{Backend, ForeignRange, ROOM, Stream};

cuvmm_tests::suite!(a_wait_that_fails_leaves_the_range_its_owners_unless_the_work_is_over);

fn deallocate(
    resource: &VirtualMemoryResource,
    range: &ForeignRange,
    stream: &StreamRef,
) -> Result<(), DeallocateError> {
    // SAFETY: the range is the test's to give away.
    unsafe { resource.deallocate(range.address, range.size, Release::Stream(stream.clone())) }
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
        let range = ForeignRange::make(backend, backend.device.location(), &[2, 1, 4], ROOM);
        backend.faults.fail(Call::cuStreamSynchronize, 1, code, When::Before);
        let error = deallocate(&resource, &range, &stream).unwrap_err();
        backend.faults.clear();
        assert_eq!((error.error().call(), error.error().code()), (Some(Call::cuStreamSynchronize), Some(code)));
        assert_eq!(error.is_deallocated(), is_over, "{code}");
        if !is_over {
            deallocate(&resource, &range, &stream).unwrap();
        }
        backend.require_unchanged(&mark);
    }
}
