//! What closing waits with made to fail, with work under way: no memory goes under it. That each failing call is told,
//! and what it leaves, is the fault matrix's matter.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use cuvmm::{CUresult, Call, CloseError, Device, Error, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_sim::faults::When;
use cuvmm_tests::{Backend, Current, G, Gate, Left, Step, Stream, queue_fill, steps};

cuvmm_tests::suite!(
    a_wait_that_fails_is_told_and_the_memory_is_freed,
    a_fence_that_fails_is_told_and_the_memory_is_freed,
    no_failing_call_of_the_gate_frees_memory_under_work,
    no_failing_call_of_the_default_gate_frees_memory_under_work,
    a_wait_that_a_capture_refuses_gives_the_buffer_back,
);

cuvmm_tests::suite!(two gpus: no_failing_call_of_the_gate_frees_memory_under_work_where_another_context_is_current);

/// How long what should be over soon may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often the calls of an end are recorded, and how often it is tried until it makes one of them.
const RECORDINGS: usize = 8;
const TRIES: usize = 20;

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

/// How a buffer goes, and the error where it did not, with the buffer where it is still there.
type End = fn(VirtualMemoryBuffer) -> Result<(), CloseError>;

/// Those that tell what failed.
const TELLING: [End; 2] = [VirtualMemoryBuffer::close, |buffer| buffer.close_within(Instant::now() + PATIENCE)];

/// Those that have nobody to tell, and are over when nothing is pending any more.
const SILENT: [End; 2] = [
    |buffer| {
        let resource = buffer.resource().clone();
        drop(buffer);
        resource.drain(Instant::now() + PATIENCE).unwrap();
        Ok(())
    },
    |buffer| {
        let resource = buffer.resource().clone();
        buffer.close_deferred();
        resource.drain(Instant::now() + PATIENCE).unwrap();
        Ok(())
    },
];

/// Makes each call of closing that is not itself tearing down fail, with work on the buffer held up. Whatever fails,
/// no memory goes under that work: either it was waited for, or the buffer comes back and can be closed after, or it is
/// tried again. On a thread of its own, whose context and capture mode may stay changed; a device's context is current there,
/// if one is given.
fn fail_gate(
    backend: &Backend,
    current: Option<&Device>,
    make: impl Fn() -> (VirtualMemoryBuffer, StreamRef, StreamRef) + Sync,
) {
    for end in TELLING {
        let refusals = fail_gate_of(backend, current, &make, end, true);
        assert!(refusals >= 2, "neither wait was refused");
    }
    for end in SILENT {
        assert_eq!(fail_gate_of(backend, current, &make, end, false), 0);
    }
}

/// How often the buffer came back.
fn fail_gate_of(
    backend: &Backend,
    current: Option<&Device>,
    make: &(impl Fn() -> (VirtualMemoryBuffer, StreamRef, StreamRef) + Sync),
    end: End,
    is_told: bool,
) -> usize {
    let record = || {
        let (buffer, release, other) = make();
        let (calls, ()) = steps(backend, || end(buffer).unwrap());
        drop((release, other));
        calls
    };
    // As few questions whether work is over as come up.
    let calls = (0..RECORDINGS).map(|_| record()).min_by_key(Vec::len).expect("a recording");
    let gate: Vec<Step> = calls.into_iter().filter(|step| !step.call.to_string().starts_with("cuMem")).collect();
    assert!(gate.len() > 8, "{gate:?}");
    let mut refusals = 0;
    for step in gate {
        let came_up = (0..TRIES).find_map(|_| fail_step(backend, current, make, end, is_told, step));
        refusals += usize::from(came_up.unwrap_or_else(|| panic!("{step:?} was not called")));
    }
    refusals
}

/// Whether the buffer came back; none where that call did not come up.
fn fail_step(
    backend: &Backend,
    current: Option<&Device>,
    make: &(impl Fn() -> (VirtualMemoryBuffer, StreamRef, StreamRef) + Sync),
    end: End,
    is_told: bool,
    step: Step,
) -> Option<bool> {
    let mark = backend.mark();
    let (buffer, release, other) = make();
    let gates = [&release, &other].map(|stream| {
        let gate = Gate::close(stream);
        queue_fill(stream, &buffer, 3);
        gate
    });
    buffer.fence(&other).unwrap();
    let fired = backend.faults.fired();
    let ended = std::thread::scope(|scope| {
        let ending = scope.spawn(|| {
            let current = current.map(Current::push);
            backend.faults.fail(step.call, step.nth, CUresult::UNKNOWN, When::Before);
            let ended = end(buffer);
            backend.faults.clear();
            drop(current);
            ended
        });
        // What could not be waited for comes back before; what can is waited for until now.
        let has_failed = || backend.faults.fired() > fired;
        await_quiet(backend, || ending.is_finished(), has_failed);
        gates.iter().for_each(Gate::open);
        ending.join().expect("an end")
    });
    let came_up = backend.faults.fired() > fired;
    let buffer = match ended.map_err(CloseError::into_parts) {
        Ok(()) => {
            assert!(!(is_told && came_up), "{step:?}: nothing noticed");
            None
        }
        Err((error, buffer)) => {
            let error = Error::from(error);
            assert_eq!((error.call(), error.code()), (Some(step.call), Some(CUresult::UNKNOWN)), "{error}");
            buffer
        }
    };
    let is_back = buffer.is_some();
    buffer.map_or(Ok(()), VirtualMemoryBuffer::close).unwrap();
    backend.require_clean();
    drop((release, other));
    backend.require_left(&mark, if came_up && !is_back { lost_at_the_gate(step) } else { Left::default() });
    came_up.then_some(is_back)
}

/// Waits until it is over, or has gone as far as it will by itself: until it makes no call any more, or, where it asks again
/// and again, for some time after one has failed.
fn await_quiet(backend: &Backend, is_over: impl Fn() -> bool, has_failed: impl Fn() -> bool) {
    const QUIET: Duration = Duration::from_millis(10);
    let deadline = Instant::now() + 2 * QUIET;
    let (mut calls, mut last, mut failed) = (backend.ledger.total(), Instant::now(), None);
    while !is_over() && Instant::now() < deadline && last.elapsed() < QUIET {
        if has_failed() && failed.get_or_insert_with(Instant::now).elapsed() > QUIET {
            return;
        }
        if backend.ledger.total() != calls {
            (calls, last) = (backend.ledger.total(), Instant::now());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
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
    fail_gate(backend, None, || attended(backend));
}

fn no_failing_call_of_the_default_gate_frees_memory_under_work(backend: &Backend) {
    fail_gate(backend, None, || {
        let (buffer, release, other) = attended(backend);
        release.synchronize().unwrap();
        buffer.set_release(Release::DefaultStream).unwrap();
        // The default stream is behind blocking streams alone.
        (buffer, Stream::blocking(&backend.device), other)
    });
}

fn no_failing_call_of_the_gate_frees_memory_under_work_where_another_context_is_current(backend: &Backend) {
    let other = backend.driver.device(1).unwrap();
    fail_gate(backend, Some(&other), || attended(backend));
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
