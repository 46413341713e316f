//! Captures, host functions and contexts: whatever the library does beside them, they are as before.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::{CUcontext, CUstreamCaptureMode};
use cuvmm::{CUresult, Call, OnDrop, Options, Outcome, Release, StreamRef};
use cuvmm_resource::Error;
use cuvmm_tests::{
    Backend, Capture, Current, G, Gate, MODES, ROOM, Stream, in_host_function, is_idle, occupy_behind, queue_fill,
    require_marks, scratch, write_marks,
};

cuvmm_tests::suite!(
    a_capture_outlives_everything_done_to_other_buffers_by_its_thread,
    a_capture_outlives_everything_done_to_other_buffers_by_other_threads,
    a_capture_of_another_thread_outlives_waits_for_work,
    closing_on_a_capturing_stream_gives_the_buffer_back,
    a_capturing_stream_is_not_waited_for_by_the_default_stream_either,
    growing_by_moving_on_a_capturing_stream_gives_the_buffer_back,
    a_refusal_waits_for_nothing,
    nothing_is_queued_on_a_capturing_stream,
    what_is_dropped_on_a_capturing_stream_goes_after_the_capture,
    closing_in_a_host_function_gives_the_buffer_back,
    what_is_dropped_in_a_host_function_goes_after_one_question_at_most,
    copies_and_fences_are_refused_in_a_host_function,
    the_current_context_and_the_capture_mode_stay_as_they_were,
    no_current_context_is_needed_and_none_is_made,
    a_buffer_is_made_on_one_thread_and_dropped_on_another,
);

/// How long what should go soon may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Everything that can be done to buffers, on other streams than the captured one and waiting for `release`.
fn everything(backend: &Backend, release: &Release) {
    let resource = backend.resource();
    let stream = StreamRef::create(&backend.device).unwrap();
    let buffer = resource.allocate(G).unwrap();
    buffer.set_release(release.clone()).unwrap();
    write_marks(&buffer, 1);
    buffer.fill_on(&stream, 0, 4096, 2).unwrap();
    queue_fill(&stream, &buffer, 3);
    buffer.fence(&stream).unwrap();
    stream.synchronize().unwrap();
    let in_place = buffer.grow(2 * G).unwrap();
    assert_eq!(in_place.outcome(), Some(Outcome::InPlace));
    let occupied = occupy_behind(&in_place);
    let moved = in_place.grow_into(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    moved.copy_to_host(0, &mut [0; 64]).unwrap();
    drop(moved);
    buffer.close_on(&stream).unwrap();
    let shareable = backend.shareable();
    let shared = shareable.allocate(G).unwrap();
    shared.set_release(release.clone()).unwrap();
    let descriptor = cuvmm::ipc::export(&shared).unwrap();
    let alias = cuvmm::ipc::import(&shareable, descriptor).unwrap();
    alias.set_release(release.clone()).unwrap();
    alias.close().unwrap();
    shared.close().unwrap();
}

/// What buffers may wait for beside a capture on a stream of that kind. The legacy default stream takes part in a
/// capture on a blocking one.
fn releases(backend: &Backend, blocking: bool) -> Vec<Release> {
    let own = StreamRef::create(&backend.device).unwrap();
    let mut releases = vec![Release::Caller, Release::Stream(own)];
    if !blocking {
        releases.push(Release::DefaultStream);
    }
    releases
}

fn streams(backend: &Backend) -> [(StreamRef, bool); 2] {
    [(Stream::non_blocking(&backend.device), false), (Stream::blocking(&backend.device), true)]
}

fn a_capture_outlives_everything_done_to_other_buffers_by_its_thread(backend: &Backend) {
    let captured = scratch(backend);
    for (stream, blocking) in streams(backend) {
        for mode in MODES {
            for release in releases(backend, blocking) {
                let capture = Capture::begin(&stream, mode, &captured);
                everything(backend, &release);
                capture.end();
            }
        }
    }
}

fn a_capture_outlives_everything_done_to_other_buffers_by_other_threads(backend: &Backend) {
    let captured = scratch(backend);
    for (stream, blocking) in streams(backend) {
        for mode in MODES {
            for release in releases(backend, blocking) {
                let capture = Capture::begin(&stream, mode, &captured);
                thread::scope(|scope| {
                    scope.spawn(|| everything(backend, &release)).join().unwrap();
                });
                capture.end();
            }
        }
    }
}

fn a_capture_of_another_thread_outlives_waits_for_work(backend: &Backend) {
    let captured = scratch(backend);
    let stream = Stream::non_blocking(&backend.device);
    for mode in MODES {
        let busy = Stream::non_blocking(&backend.device);
        let buffer = backend.resource().allocate(G).unwrap();
        buffer.set_release(Release::Stream(busy.clone())).unwrap();
        let gate = Gate::close(&busy);
        queue_fill(&busy, &buffer, 1);
        let capture = Capture::begin(&stream, mode, &captured);
        thread::scope(|scope| {
            scope.spawn(|| gate.require_wait(&busy, || buffer.close()).unwrap()).join().unwrap();
        });
        capture.end();
    }
}

fn closing_on_a_capturing_stream_gives_the_buffer_back(backend: &Backend) {
    let captured = scratch(backend);
    for (stream, _) in streams(backend) {
        for mode in MODES {
            let mut buffer = backend.resource().allocate(G).unwrap();
            write_marks(&buffer, 4);
            buffer.set_release(Release::Stream(stream.clone())).unwrap();
            let capture = Capture::begin(&stream, mode, &captured);
            let mark = backend.mark();
            for _ in 0..2 {
                let (error, back) = buffer.close().unwrap_err().into_parts();
                assert_eq!(error, Error::StreamCapturing);
                buffer = back.expect("the buffer");
            }
            let (error, back) = buffer.close_on(&stream).unwrap_err().into_parts();
            assert_eq!(error, Error::StreamCapturing);
            buffer = back.expect("the buffer");
            backend.require_unchanged(&mark);
            capture.end();
            require_marks(&buffer, 4, G);
            buffer.close().unwrap();
        }
    }
}

fn a_capturing_stream_is_not_waited_for_by_the_default_stream_either(backend: &Backend) {
    let captured = scratch(backend);
    let stream = Stream::blocking(&backend.device);
    for mode in MODES {
        let buffer = backend.resource().allocate(G).unwrap();
        assert!(matches!(buffer.released_after(), Release::DefaultStream));
        let capture = Capture::begin(&stream, mode, &captured);
        let (error, buffer) = buffer.close().unwrap_err().into_parts();
        assert_eq!(error, Error::StreamCapturing);
        capture.end();
        buffer.expect("the buffer").close().unwrap();
    }
}

fn growing_by_moving_on_a_capturing_stream_gives_the_buffer_back(backend: &Backend) {
    let captured = scratch(backend);
    let stream = Stream::non_blocking(&backend.device);
    let buffer = backend.resource().allocate(G).unwrap();
    write_marks(&buffer, 4);
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let occupied = occupy_behind(&buffer);
    let capture = Capture::begin(&stream, CUstreamCaptureMode::GLOBAL, &captured);
    let mark = backend.mark();
    let (error, buffer) = buffer.grow_into(ROOM + G).unwrap_err().into_parts();
    assert_eq!(error, Error::StreamCapturing);
    backend.require_unchanged(&mark);
    // In place nothing has to be waited for.
    let buffer = buffer.grow_into(2 * G).unwrap();
    assert_eq!(buffer.outcome(), Some(Outcome::InPlace));
    capture.end();
    drop(occupied);
    require_marks(&buffer, 4, G);
    buffer.close().unwrap();
}

fn a_refusal_waits_for_nothing(backend: &Backend) {
    let captured = scratch(backend);
    let (busy, capturing) = (Stream::non_blocking(&backend.device), Stream::non_blocking(&backend.device));
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Stream(capturing.clone())).unwrap();
    let gate = Gate::close(&busy);
    queue_fill(&busy, &buffer, 5);
    buffer.fence(&busy).unwrap();
    let capture = Capture::begin(&capturing, CUstreamCaptureMode::RELAXED, &captured);
    let buffer = buffer.close().unwrap_err().into_buffer().expect("the buffer");
    assert!(!is_idle(&busy), "it waited, though it was to refuse");
    capture.end();
    // The fence is still there.
    gate.require_wait(&busy, || buffer.close()).unwrap();
}

fn nothing_is_queued_on_a_capturing_stream(backend: &Backend) {
    let captured = scratch(backend);
    for (stream, _) in streams(backend) {
        for mode in MODES {
            let buffer = backend.resource().allocate(G).unwrap();
            buffer.set_release(Release::Caller).unwrap();
            let capture = Capture::begin(&stream, mode, &captured);
            let before = backend.ledger.calls().len();
            assert_eq!(buffer.fence(&stream), Err(Error::StreamCapturing));
            assert_eq!(buffer.fill_on(&stream, 0, G, 1), Err(Error::StreamCapturing));
            assert_eq!(buffer.copy_from_host_on(&stream, 0, &[1; 8]), Err(Error::StreamCapturing));
            assert_eq!(buffer.copy_to_host_on(&stream, 0, &mut [1; 8]), Err(Error::StreamCapturing));
            assert_eq!(stream.synchronize(), Err(Error::StreamCapturing));
            let harmless = [
                Call::cuCtxGetCurrent,
                Call::cuCtxPushCurrent,
                Call::cuCtxPopCurrent,
                Call::cuThreadExchangeStreamCaptureMode,
                Call::cuStreamIsCapturing,
            ];
            let calls = backend.ledger.calls().split_off(before);
            assert!(calls.iter().all(|call| harmless.contains(call)), "{calls:?}");
            capture.end();
            buffer.close().unwrap();
        }
    }
}

fn what_is_dropped_on_a_capturing_stream_goes_after_the_capture(backend: &Backend) {
    for on_drop in [OnDrop::Wait, OnDrop::Defer] {
        let resource = backend.resource_with(Options::new().on_drop(on_drop));
        for (stream, _) in streams(backend) {
            for mode in MODES {
                let mark = backend.mark();
                let buffer = resource.allocate(G).unwrap();
                buffer.set_release(Release::Stream(stream.clone())).unwrap();
                let capture = Capture::begin(&stream, mode, &buffer);
                let unmapped = backend.watch(Call::cuMemUnmap);
                drop(buffer);
                let in_vain = resource.drain(Instant::now() + Duration::from_millis(5));
                assert_eq!(in_vain, Err(Error::StillPending { buffers: 1 }));
                assert_eq!((unmapped.take_pairs(), resource.pending()), (vec![], 1));
                capture.end();
                resource.drain(Instant::now() + PATIENCE).unwrap();
                assert_eq!(unmapped.take_pairs().len(), 1);
                backend.require_unchanged(&mark);
            }
        }
    }
}

fn closing_in_a_host_function_gives_the_buffer_back(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    for release in [Release::DefaultStream, Release::Caller, Release::Stream(stream.clone())] {
        let buffer = resource.allocate(G).unwrap();
        buffer.set_release(release).unwrap();
        write_marks(&buffer, 6);
        let mark = backend.mark();
        let (error, buffer) = in_host_function(&stream, move || buffer.close().unwrap_err().into_parts());
        assert_eq!(error, Error::HostCallback);
        backend.require_questions(1);
        backend.require_unchanged(&mark);
        let buffer = buffer.expect("the buffer");
        require_marks(&buffer, 6, G);
        buffer.close().unwrap();
    }
}

fn what_is_dropped_in_a_host_function_goes_after_one_question_at_most(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let other = Stream::non_blocking(&backend.device);
    for (on_drop, questions) in [(OnDrop::Wait, 1), (OnDrop::Defer, 0)] {
        for release in [Release::DefaultStream, Release::Caller, Release::Stream(stream.clone())] {
            let mark = backend.mark();
            let buffer = backend.resource_with(Options::new().on_drop(on_drop)).allocate(G).unwrap();
            write_marks(&buffer, 6);
            buffer.set_release(release).unwrap();
            buffer.fence(&other).unwrap();
            // With it goes the resource, and the stream that this has of its own.
            in_host_function(&stream, move || drop(buffer));
            backend.require_questions(questions);
            backend.require_unchanged(&mark);
        }
        let mark = backend.mark();
        let buffer = backend.resource_with(Options::new().on_drop(on_drop)).allocate(G).unwrap();
        in_host_function(&stream, move || buffer.close_deferred());
        backend.require_questions(0);
        backend.require_unchanged(&mark);
    }
}

fn copies_and_fences_are_refused_in_a_host_function(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    let buffer = resource.allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let other = Stream::non_blocking(&backend.device);
    let (buffer, errors) = in_host_function(&stream, move || {
        let errors = [
            buffer.fill(0, 8, 1).unwrap_err(),
            buffer.copy_from_host(0, &[1]).unwrap_err(),
            buffer.copy_to_host_on(&other, 0, &mut [1]).unwrap_err(),
            buffer.fence(&other).unwrap_err(),
            other.synchronize().unwrap_err(),
        ];
        // Not the last share of the stream, whose end is a call too.
        ((buffer, other), errors)
    });
    assert!(errors.iter().all(|error| *error == Error::HostCallback), "{errors:?}");
    backend.require_questions(5);
    buffer.0.close().unwrap();
}

/// Demands that an operation leaves the thread's context and capture mode as they were.
#[track_caller]
fn require_kept(backend: &Backend, context: CUcontext, work: impl FnOnce()) {
    let driver = &backend.driver;
    for mode in MODES {
        let before = driver.thread_exchange_stream_capture_mode(mode).unwrap();
        assert_eq!(driver.ctx_get_current().unwrap(), context);
        assert_eq!(driver.thread_exchange_stream_capture_mode(before).unwrap(), mode);
    }
    let before = driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::THREAD_LOCAL).unwrap();
    work();
    assert_eq!(driver.ctx_get_current().unwrap(), context);
    assert_eq!(driver.thread_exchange_stream_capture_mode(before).unwrap(), CUstreamCaptureMode::THREAD_LOCAL);
}

fn the_current_context_and_the_capture_mode_stay_as_they_were(backend: &Backend) {
    let release = Release::Stream(StreamRef::create(&backend.device).unwrap());
    require_kept(backend, CUcontext::NULL, || everything(backend, &release));
    let current = Current::push(&backend.device);
    require_kept(backend, current.context, || everything(backend, &release));
    require_kept(backend, current.context, || everything(backend, &Release::DefaultStream));
    // Failures leave it too.
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(release).unwrap();
    require_kept(backend, current.context, || {
        let when = cuvmm_sim::faults::When::Before;
        backend.faults.fail(Call::cuStreamSynchronize, 1, CUresult::ILLEGAL_ADDRESS, when);
        assert_eq!(buffer.close().unwrap_err().error().code(), Some(CUresult::ILLEGAL_ADDRESS));
    });
    backend.faults.clear();
}

fn no_current_context_is_needed_and_none_is_made(backend: &Backend) {
    assert_eq!(backend.driver.ctx_get_current().unwrap(), CUcontext::NULL);
    let before = backend.ledger.calls().len();
    let buffer = backend.resource().allocate(G).unwrap();
    let grown = buffer.grow(2 * G).unwrap();
    drop(grown);
    buffer.close().unwrap();
    assert_eq!(backend.driver.ctx_get_current().unwrap(), CUcontext::NULL);
    // Where the device's context is not in use, nothing begins to use it.
    let calls = backend.ledger.calls().split_off(before);
    if !backend.device.primary_ctx_is_active().unwrap() {
        assert!(!calls.contains(&Call::cuDevicePrimaryCtxRetain), "{calls:?}");
    }
    assert_eq!(backend.live().contexts, 0);
}

fn a_buffer_is_made_on_one_thread_and_dropped_on_another(backend: &Backend) {
    let current = Current::push(&backend.device);
    let stream = Stream::non_blocking(&backend.device);
    let made = thread::scope(|scope| {
        scope
            .spawn(|| {
                let buffer = backend.resource().allocate(G).unwrap();
                buffer.set_release(Release::Stream(stream.clone())).unwrap();
                write_marks(&buffer, 9);
                buffer
            })
            .join()
            .unwrap()
    });
    let grown = made.grow(2 * G).unwrap();
    let gate = Gate::close(&stream);
    queue_fill(&stream, &made, 1);
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(backend.driver.ctx_get_current().unwrap(), CUcontext::NULL);
            gate.require_wait(&stream, || drop(made));
            assert_eq!(backend.driver.ctx_get_current().unwrap(), CUcontext::NULL);
        });
    });
    drop(current);
    thread::scope(|scope| {
        scope.spawn(|| grown.close().unwrap());
    });
}
