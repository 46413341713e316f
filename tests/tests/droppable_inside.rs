//! A buffer can be dropped anywhere: in a host function of the driver's, in the destructor of a user object, and while streams
//! capture.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cuvmm::driver::sys::CUstreamCaptureMode;
use cuvmm::{CUresult, Call, OnDrop, Options, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::faults::When;
use cuvmm_tests::{
    Backend, Capture, G, Gate, Graph, MODES, Spin, Stream, after, buffer_on, drain, in_destructor, in_host_function,
    is_idle, queue_fill, scratch, until, write_marks,
};

cuvmm_tests::suite!(
    dropped_in_a_host_function_it_goes_after,
    dropped_in_a_destructor_it_goes_after,
    dropped_while_its_stream_captures_it_goes_after,
    dropped_while_a_fenced_stream_captures_it_goes_after,
    what_a_short_capture_took_is_waited_for_all_the_same,
);

fn resource(backend: &Backend, on_drop: OnDrop) -> VirtualMemoryResource {
    backend.resource_with(Options::new().on_drop(on_drop))
}

/// Drops buffers where the driver calls the program back, by `there`, with their work still to come.
fn drop_in_a_callback(backend: &Backend, there: impl Fn(Box<dyn FnOnce() -> Vec<Call> + Send>) -> Vec<Call>) {
    // No other host function, which would hold this one up, too.
    let spin = Spin::load(&backend.device);
    for (on_drop, questions) in [(OnDrop::Wait, 1), (OnDrop::Defer, 0)] {
        let resource = resource(backend, on_drop);
        let stream = Stream::non_blocking(&backend.device);
        let releases = [Release::Stream(stream.clone()), Release::DefaultStream, Release::Caller];
        for release in releases {
            let buffer = resource.allocate(G).unwrap();
            write_marks(&buffer, 1);
            if matches!(release, Release::Stream(_)) {
                spin.queue(&stream, buffer.address(), Duration::from_millis(100));
            }
            buffer.set_release(release).unwrap();
            let ledger = backend.ledger.clone();
            let calls = there(Box::new(move || {
                let (before, here) = (ledger.total(), thread::current().id());
                drop(buffer);
                let calls = ledger.log_since(before).into_iter().filter(|made| made.thread == here);
                calls.map(|made| made.call).collect()
            }));
            assert_eq!(calls, vec![Call::cuCtxGetCurrent; questions], "calls in a callback");
            backend.require_questions(questions);
            drain(&resource);
            assert!(is_idle(&stream));
            assert_eq!(backend.ledger.live().mappings, 0);
        }
    }
    drop(spin);
    backend.require_all_gone();
}

fn dropped_in_a_host_function_it_goes_after(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    drop_in_a_callback(backend, |work| in_host_function(&stream, work));
    // Also on the very stream that it waits for, behind work on it; and with the last shares of the resource and its stream.
    for (on_drop, questions) in [(OnDrop::Wait, 1), (OnDrop::Defer, 0)] {
        let resource = resource(backend, on_drop);
        let buffer = buffer_on(&resource, &stream);
        write_marks(&buffer, 2);
        queue_fill(&stream, &buffer, 2);
        drop(resource);
        in_host_function(&stream, || drop(buffer));
        backend.require_questions(questions);
        until("the resource's stream is gone", || backend.live().streams == 1);
        until("the memory is gone", || backend.ledger.live().mappings == 0);
    }
    until("nothing is left", || backend.ledger.live().reservations == 0 && backend.ledger.live().contexts == 1);
}

fn dropped_in_a_destructor_it_goes_after(backend: &Backend) {
    drop_in_a_callback(backend, |work| in_destructor(&backend.device, work));
}

/// Captures a fill of `captured`, with `meanwhile` done before the capture ends, and demands that it lived, and that what was
/// captured runs.
#[track_caller]
fn require_usable(
    stream: &StreamRef,
    mode: CUstreamCaptureMode,
    captured: &VirtualMemoryBuffer,
    meanwhile: impl FnOnce(),
) {
    captured.fill(0, G, 0).unwrap();
    let graph = Graph::capture(stream, mode, || {
        queue_fill(stream, captured, 0x77);
        meanwhile();
    });
    graph.instantiate(stream).launch(stream);
    stream.synchronize().unwrap();
    let mut seen = [0; 16];
    captured.copy_to_host(G - 16, &mut seen).unwrap();
    assert_eq!(seen, [0x77; 16]);
}

fn dropped_while_its_stream_captures_it_goes_after(backend: &Backend) {
    let captured = scratch(backend);
    for on_drop in [OnDrop::Wait, OnDrop::Defer] {
        let resource = resource(backend, on_drop);
        let streams = [Stream::non_blocking(&backend.device), Stream::blocking(&backend.device)];
        for (stream, mode) in streams.iter().flat_map(|stream| MODES.map(|mode| (stream, mode))) {
            let (buffer, other) = (buffer_on(&resource, stream), buffer_on(&resource, stream));
            require_usable(stream, mode, &captured, || {
                drop(buffer);
                thread::scope(|scope| scope.spawn(|| drop(other)).join().unwrap());
                // It is asked again and again meanwhile.
                thread::sleep(Duration::from_millis(5));
                assert_eq!((resource.pending(), backend.ledger.live().mappings), (2, 3));
            });
            drain(&resource);
            assert_eq!(backend.ledger.live().mappings, 1);
        }
    }
    captured.close().unwrap();
    backend.require_all_gone();
}

fn dropped_while_a_fenced_stream_captures_it_goes_after(backend: &Backend) {
    let captured = scratch(backend);
    let resource = resource(backend, OnDrop::Defer);
    for mode in MODES {
        let stream = Stream::non_blocking(&backend.device);
        let buffer = resource.allocate(G).unwrap();
        buffer.set_release(Release::Caller).unwrap();
        let gate = Gate::close(&stream);
        queue_fill(&stream, &buffer, 3);
        buffer.fence(&stream).unwrap();
        require_usable(&stream, mode, &captured, || {
            drop(buffer);
            thread::sleep(Duration::from_millis(5));
            assert_eq!((resource.pending(), backend.ledger.live().mappings), (1, 2));
            // What it waits for comes before the capture, and ends beside it.
            gate.open();
            drain(&resource);
        });
    }
    captured.close().unwrap();
    backend.require_all_gone();
}

/// Has a capture begin right before the next event is recorded, and end right before it is asked next whether there is one.
fn capture_around_a_record(backend: &Backend, stream: &StreamRef, captured: &Arc<VirtualMemoryBuffer>) {
    let capture = Arc::new(Mutex::new(None));
    let (ended, begun) = (Arc::clone(&capture), AtomicBool::new(false));
    let (stream, captured) = (stream.clone(), Arc::clone(captured));
    let begin = move |_: &[u64]| {
        if !begun.swap(true, Ordering::Relaxed) {
            *capture.lock().unwrap() = Some(Capture::begin(&stream, CUstreamCaptureMode::RELAXED, &captured));
        }
        false
    };
    let end = move |_: &[u64]| {
        let capture = ended.lock().unwrap().take();
        capture.into_iter().for_each(Capture::end);
        false
    };
    backend.faults.fail_when(Call::cuEventRecord, begin, CUresult::UNKNOWN, When::Before);
    backend.faults.fail_when(Call::cuStreamIsCapturing, end, CUresult::UNKNOWN, When::Before);
}

fn what_a_short_capture_took_is_waited_for_all_the_same(backend: &Backend) {
    let captured = Arc::new(scratch(backend));
    let ends: [fn(VirtualMemoryBuffer, &StreamRef); 4] = [
        |buffer, _| buffer.close_deferred(),
        |buffer, _| drop(buffer),
        |buffer, _| buffer.close_within(after(Duration::from_secs(30))).unwrap(),
        |buffer, stream| {
            buffer.set_release(Release::Caller).unwrap();
            buffer.fence(stream).unwrap();
            buffer.close().unwrap();
        },
    ];
    for end in ends {
        let resource = backend.resource();
        let stream = Stream::non_blocking(&backend.device);
        let buffer = buffer_on(&resource, &stream);
        let gate = Gate::close(&stream);
        queue_fill(&stream, &buffer, 6);
        capture_around_a_record(backend, &stream, &captured);
        gate.open_after(Duration::from_millis(20), || end(buffer, &stream));
        drain(&resource);
        assert!(is_idle(&stream));
        backend.faults.clear();
    }
    Arc::into_inner(captured).unwrap().close().unwrap();
    backend.require_all_gone();
}
