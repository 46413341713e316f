//! Every driver call of closing made to fail: closing goes on, tells the first error, and strands what that call, and
//! what needed it, would have undone.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use cuvmm::{CUresult, Call, Error, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_sim::faults::When;
use cuvmm_tests::{
    Backend, G, Gate, Left, ROOM, Step, Stream, occupy_behind, queue_fill, require_marks, steps, with_room_behind,
    write_marks,
};

cuvmm_tests::suite!(
    an_unmap_that_fails_strands_the_mapping_and_its_addresses,
    a_release_that_fails_strands_one_reference,
    a_free_that_fails_strands_one_reservation,
    each_unmap_of_a_buffer_of_three_chunks_strands_its_own_chunk,
    each_teardown_call_of_a_moved_buffer_strands_its_own_part,
    closing_an_alias_frees_nothing_that_another_maps,
    several_failures_are_counted_each_and_the_first_is_told,
    a_wait_that_fails_is_told_and_the_memory_is_freed,
    a_fence_that_fails_is_told_and_the_memory_is_freed,
    no_failing_call_of_the_gate_frees_memory_under_work,
    no_failing_call_of_the_default_gate_frees_memory_under_work,
    a_wait_that_a_capture_refuses_gives_the_buffer_back,
    a_grow_into_whose_wait_fails_gives_the_buffer_back,
    a_grow_into_whose_old_addresses_stay_is_grown,
    dropping_counts_what_closing_tells,
);

/// What a call of tearing down leaves when it fails before its effect.
fn kept(call: Call) -> Left {
    match call {
        Call::cuMemUnmap => Left { mappings: 1, reservations: 1, stranded: 1, ..Left::default() },
        Call::cuMemRelease => Left { allocations: 1, stranded: 1, ..Left::default() },
        Call::cuMemAddressFree => Left { reservations: 1, stranded: 1, ..Left::default() },
        call => panic!("{call} tears nothing down"),
    }
}

/// A buffer that waits for nothing, so that closing it tears down and no more.
fn unattended(backend: &Backend) -> VirtualMemoryBuffer {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    buffer
}

/// Closes a buffer while that call fails, and demands that this is told and that the buffer is gone.
#[track_caller]
fn close_failing(backend: &Backend, buffer: VirtualMemoryBuffer, step: Step, code: CUresult) {
    let fired = backend.faults.fired();
    backend.faults.fail(step.call, step.nth, code, When::Before);
    let (error, buffer) = buffer.close().expect_err("an error to tell").into_parts();
    backend.faults.clear();
    assert_eq!(backend.faults.fired(), fired + 1);
    let error = Error::from(error);
    assert_eq!((error.call(), error.code()), (Some(step.call), Some(code)), "{error}");
    assert!(buffer.is_none(), "closed all the same");
}

fn fail_teardown(backend: &Backend, call: Call) {
    for code in [CUresult::INVALID_VALUE, CUresult::ILLEGAL_ADDRESS, CUresult::UNKNOWN] {
        let mark = backend.mark();
        close_failing(backend, unattended(backend), Step { call, nth: 1 }, code);
        backend.require_left(&mark, kept(call));
    }
}

fn an_unmap_that_fails_strands_the_mapping_and_its_addresses(backend: &Backend) {
    fail_teardown(backend, Call::cuMemUnmap);
}

fn a_release_that_fails_strands_one_reference(backend: &Backend) {
    fail_teardown(backend, Call::cuMemRelease);
}

fn a_free_that_fails_strands_one_reservation(backend: &Backend) {
    fail_teardown(backend, Call::cuMemAddressFree);
}

fn each_unmap_of_a_buffer_of_three_chunks_strands_its_own_chunk(backend: &Backend) {
    // Three chunks, each in a reservation of its own.
    let make = || {
        let first = with_room_behind(&backend.resource(), ROOM);
        first.set_release(Release::Caller).unwrap();
        first.grow_into(2 * ROOM).unwrap().grow_into(3 * ROOM).unwrap()
    };
    for nth in 1..=3 {
        for call in [Call::cuMemUnmap, Call::cuMemRelease, Call::cuMemAddressFree] {
            let mark = backend.mark();
            let buffer = make();
            if buffer.mappings().iter().any(|mapping| mapping.room().offset() > 0) {
                // It moved, for lack of free addresses: no simulator does that.
                assert!(backend.is_gpu());
                buffer.close().unwrap();
                continue;
            }
            close_failing(backend, buffer, Step { call, nth }, CUresult::UNKNOWN);
            backend.require_left(&mark, kept(call));
        }
    }
}

fn each_teardown_call_of_a_moved_buffer_strands_its_own_part(backend: &Backend) {
    let make = || {
        let resource = backend.resource();
        let first = resource.allocate(G).unwrap();
        first.set_release(Release::Caller).unwrap();
        let second = first.grow_into(2 * G).unwrap();
        let occupied = occupy_behind(&second);
        let moved = second.grow_into(ROOM + G).unwrap();
        drop(occupied);
        assert_eq!(moved.chunks().len(), 3);
        moved
    };
    for step in [
        Step { call: Call::cuMemUnmap, nth: 1 },
        Step { call: Call::cuMemUnmap, nth: 2 },
        Step { call: Call::cuMemUnmap, nth: 3 },
        Step { call: Call::cuMemRelease, nth: 1 },
        Step { call: Call::cuMemRelease, nth: 3 },
        Step { call: Call::cuMemAddressFree, nth: 1 },
    ] {
        let mark = backend.mark();
        close_failing(backend, make(), step, CUresult::UNKNOWN);
        backend.require_left(&mark, kept(step.call));
    }
}

fn closing_an_alias_frees_nothing_that_another_maps(backend: &Backend) {
    let buffer = unattended(backend);
    write_marks(&buffer, 9);
    let alias = buffer.grow(G).unwrap();
    let longer = buffer.grow(2 * G).unwrap();
    let mark = backend.mark();
    let (calls, ()) = steps(backend, || buffer.close().unwrap());
    assert_eq!(calls.iter().filter(|step| step.call == Call::cuMemUnmap).count(), 0);
    backend.require_unchanged(&mark);
    // The longer one first: only what it added goes.
    let watched = backend.watch(Call::cuMemUnmap);
    let end = alias.address().0 + G as u64;
    longer.close().unwrap();
    assert_eq!(watched.take_pairs(), [(end, G as u64)]);
    require_marks(&alias, 9, G);
    alias.close().unwrap();
}

fn several_failures_are_counted_each_and_the_first_is_told(backend: &Backend) {
    let mark = backend.mark();
    let buffer = unattended(backend);
    let longer = buffer.grow(2 * G).unwrap();
    drop(buffer);
    backend.faults.fail(Call::cuMemRelease, 1, CUresult::INVALID_VALUE, When::Before);
    backend.faults.fail(Call::cuMemUnmap, 2, CUresult::UNKNOWN, When::Before);
    let (error, none) = longer.close().unwrap_err().into_parts();
    backend.faults.clear();
    assert!(none.is_none());
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemRelease), Some(CUresult::INVALID_VALUE)));
    // The second chunk's memory, and the first one's mapping with the addresses around it.
    backend.require_left(&mark, Left { mappings: 1, reservations: 1, allocations: 1, stranded: 2, ..Left::default() });
}

/// A buffer with a release stream and a fence on another, both idle.
fn attended(backend: &Backend) -> (VirtualMemoryBuffer, StreamRef, StreamRef) {
    let resource = backend.resource();
    let (release, other) = (Stream::non_blocking(&backend.device), Stream::non_blocking(&backend.device));
    let buffer = resource.allocate(G).unwrap();
    buffer.set_release(Release::Stream(release.clone())).unwrap();
    queue_fill(&release, &buffer, 1);
    queue_fill(&other, &buffer, 2);
    buffer.fence(&other).unwrap();
    (buffer, release, other)
}

const WAIT_CODES: [CUresult; 4] =
    [CUresult::ILLEGAL_ADDRESS, CUresult::CONTEXT_IS_DESTROYED, CUresult::INVALID_HANDLE, CUresult::LAUNCH_FAILED];

fn a_wait_that_fails_is_told_and_the_memory_is_freed(backend: &Backend) {
    for code in WAIT_CODES {
        let mark = backend.mark();
        let (buffer, release, other) = attended(backend);
        // A failure before its effect waits for nothing: the test does, lest the memory go under the fill.
        release.synchronize().unwrap();
        close_failing(backend, buffer, Step { call: Call::cuStreamSynchronize, nth: 1 }, code);
        drop((release, other));
        backend.require_unchanged(&mark);
    }
}

fn a_fence_that_fails_is_told_and_the_memory_is_freed(backend: &Backend) {
    for code in WAIT_CODES {
        let mark = backend.mark();
        let (buffer, release, other) = attended(backend);
        other.synchronize().unwrap();
        close_failing(backend, buffer, Step { call: Call::cuEventSynchronize, nth: 1 }, code);
        drop((release, other));
        backend.require_unchanged(&mark);
    }
}

/// Makes each call of closing that is not itself tearing down fail, with work on the buffer held up. Whatever fails,
/// no memory goes under that work: either it was waited for, or the buffer comes back and can be closed after. On a
/// thread of its own, whose context and capture mode may stay changed.
fn fail_gate(backend: &Backend, make: impl Fn() -> (VirtualMemoryBuffer, StreamRef, StreamRef) + Sync) {
    let (calls, ()) = {
        let (buffer, release, other) = make();
        let result = steps(backend, || buffer.close().unwrap());
        drop((release, other));
        result
    };
    let gate: Vec<Step> = calls.into_iter().filter(|step| !step.call.to_string().starts_with("cuMem")).collect();
    assert!(gate.len() > 8, "{gate:?}");
    let mut refusals = 0;
    for step in gate {
        let mark = backend.mark();
        let (buffer, release, other) = make();
        let gates = [&release, &other].map(|stream| {
            let gate = Gate::close(stream);
            queue_fill(stream, &buffer, 3);
            gate
        });
        buffer.fence(&other).unwrap();
        let fired = backend.faults.fired();
        backend.faults.fail(step.call, step.nth, CUresult::UNKNOWN, When::Before);
        let closed = std::thread::scope(|scope| {
            let closing = scope.spawn(|| buffer.close());
            std::thread::sleep(Duration::from_millis(20));
            // What could not be waited for comes back before; what can is waited for until now.
            gates.iter().for_each(Gate::open);
            closing.join().expect("a close")
        });
        backend.faults.clear();
        assert_eq!(backend.faults.fired(), fired + 1, "{step:?}");
        let (error, buffer) = closed.expect_err("an error to tell").into_parts();
        let error = Error::from(error);
        assert_eq!((error.call(), error.code()), (Some(step.call), Some(CUresult::UNKNOWN)), "{error}");
        let lost = match buffer {
            Some(buffer) => {
                refusals += 1;
                buffer.close().unwrap();
                Left::default()
            }
            None => lost_at_the_gate(step),
        };
        backend.require_clean();
        drop((release, other));
        backend.require_left(&mark, lost);
    }
    assert!(refusals >= 2, "neither wait was refused");
}

/// What the gate leaves when a call of it fails before its effect.
fn lost_at_the_gate(step: Step) -> Left {
    match step.call {
        Call::cuEventDestroy => Left { events: 1, stranded: 1, ..Left::default() },
        Call::cuDevicePrimaryCtxRelease => Left { contexts: 1, stranded: 1, ..Left::default() },
        // The thread's context is not restored, nor its capture mode by each second exchange.
        Call::cuCtxPopCurrent => Left { stranded: 1, ..Left::default() },
        Call::cuThreadExchangeStreamCaptureMode => Left { stranded: (step.nth + 1) % 2, ..Left::default() },
        _ => Left::default(),
    }
}

fn no_failing_call_of_the_gate_frees_memory_under_work(backend: &Backend) {
    fail_gate(backend, || attended(backend));
}

fn no_failing_call_of_the_default_gate_frees_memory_under_work(backend: &Backend) {
    fail_gate(backend, || {
        let (buffer, release, other) = attended(backend);
        release.synchronize().unwrap();
        buffer.set_release(Release::DefaultStream).unwrap();
        // The default stream is behind blocking streams alone.
        (buffer, Stream::blocking(&backend.device), other)
    });
}

fn a_wait_that_a_capture_refuses_gives_the_buffer_back(backend: &Backend) {
    for (call, code) in [
        (Call::cuStreamSynchronize, CUresult::STREAM_CAPTURE_UNSUPPORTED),
        (Call::cuStreamSynchronize, CUresult::STREAM_CAPTURE_IMPLICIT),
        (Call::cuEventSynchronize, CUresult::STREAM_CAPTURE_INVALIDATED),
        (Call::cuStreamIsCapturing, CUresult::STREAM_CAPTURE_IMPLICIT),
    ] {
        let (buffer, _release, other) = attended(backend);
        let gate = Gate::close(&other);
        queue_fill(&other, &buffer, 3);
        buffer.fence(&other).unwrap();
        if call == Call::cuEventSynchronize {
            // That wait is refused at its turn, which comes when the gate is open or not.
            gate.open();
        }
        let mark = backend.mark();
        backend.faults.fail(call, 1, code, When::Before);
        let buffer = buffer.close().unwrap_err().into_buffer().expect("the buffer");
        backend.faults.clear();
        backend.require_unchanged(&mark);
        // What it was to wait for it still waits for.
        if call == Call::cuEventSynchronize {
            buffer.close().unwrap();
        } else {
            gate.require_wait(&other, || buffer.close()).unwrap();
        }
    }
}

fn a_grow_into_whose_wait_fails_gives_the_buffer_back(backend: &Backend) {
    let before = backend.mark();
    let (buffer, release, other) = attended(backend);
    release.synchronize().unwrap();
    other.synchronize().unwrap();
    write_marks(&buffer, 5);
    let occupied = occupy_behind(&buffer);
    backend.faults.fail(Call::cuStreamSynchronize, 1, CUresult::ILLEGAL_ADDRESS, When::Before);
    let error = buffer.grow_into(ROOM + G).unwrap_err();
    backend.faults.clear();
    assert_eq!(error.error().code(), Some(CUresult::ILLEGAL_ADDRESS));
    let buffer = error.into_buffer();
    assert_eq!((buffer.size(), backend.live().mappings), (G, 1));
    require_marks(&buffer, 5, G);
    let grown = buffer.grow_into(ROOM + G).unwrap();
    require_marks(&grown, 5, G);
    grown.close().unwrap();
    drop((occupied, release, other));
    backend.require_unchanged(&before);
}

fn a_grow_into_whose_old_addresses_stay_is_grown(backend: &Backend) {
    // The first free is of where the driver made the reservation that was wanted behind.
    for (call, nth) in [(Call::cuMemUnmap, 1), (Call::cuMemAddressFree, 2)] {
        let mark = backend.mark();
        let buffer = unattended(backend);
        write_marks(&buffer, 5);
        let occupied = occupy_behind(&buffer);
        backend.faults.fail(call, nth, CUresult::UNKNOWN, When::Before);
        let (error, grown) = buffer.grow_into(ROOM + G).unwrap_err().into_parts();
        backend.faults.clear();
        assert_eq!((error.call(), error.code()), (Some(call), Some(CUresult::UNKNOWN)));
        assert_eq!(grown.size(), ROOM + G);
        require_marks(&grown, 5, G);
        grown.close().unwrap();
        drop(occupied);
        backend.require_left(&mark, kept(call));
    }
}

fn dropping_counts_what_closing_tells(backend: &Backend) {
    for call in [Call::cuMemUnmap, Call::cuMemRelease, Call::cuMemAddressFree] {
        let mark = backend.mark();
        let buffer = unattended(backend);
        backend.faults.fail(call, 1, CUresult::UNKNOWN, When::Before);
        drop(buffer);
        backend.faults.clear();
        backend.require_left(&mark, kept(call));
    }
}
