//! Ten thousand operations beside captures of every mode, on both kinds of streams, by this thread and another: every capture
//! ends well. What is deferred goes on beside those that come after.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use cuvmm::{OnDrop, Options, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_resource::Error;
use cuvmm_tests::{
    Backend, Capture, G, Gate, MODES, Stream, after, drain, is_idle, queue_fill, queue_fill_at, scratch,
};

cuvmm_tests::suite!(
    ten_thousand_operations_harm_no_capture,
    operations_harm_no_captures_that_come_and_go,
    waits_for_work_that_goes_on_harm_no_capture,
);

/// How many bytes are written by each piece of work.
const WRITTEN: usize = 4096;

/// Buffers for a thread that works beside captures, and how many operations it did.
struct Worker {
    waiting: VirtualMemoryResource,
    deferring: VirtualMemoryResource,
    /// What buffers are used on.
    stream: StreamRef,
    /// What they wait for.
    release: StreamRef,
    done: AtomicUsize,
}

impl Worker {
    /// One whose buffers wait for streams that are named: the legacy default stream takes part in captures on blocking ones.
    fn new(backend: &Backend) -> Self {
        let release = Stream::non_blocking(&backend.device);
        let resource = |on_drop| {
            let options = Options::new().on_drop(on_drop).release(Release::Stream(release.clone()));
            backend.resource_with(options)
        };
        Self {
            waiting: resource(OnDrop::Wait),
            deferring: resource(OnDrop::Defer),
            stream: Stream::non_blocking(&backend.device),
            release: release.clone(),
            done: AtomicUsize::new(0),
        }
    }

    fn count<T>(&self, result: T) -> T {
        self.done.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// A buffer with work on both streams.
    fn used(&self, resource: &VirtualMemoryResource) -> VirtualMemoryBuffer {
        let buffer = self.count(resource.allocate_with_capacity(G, 2 * G)).unwrap();
        self.count(buffer.fill_on(&self.stream, 0, 64, 1)).unwrap();
        let queue = |stream, value| queue_fill_at(self.stream.driver(), stream, buffer.address(), WRITTEN, value);
        queue(&self.stream, 2);
        self.count(buffer.fence(&self.stream)).unwrap();
        queue(&self.release, 3);
        buffer
    }

    /// Everything that ends a buffer, some ways that it grows, and what is done with it. What returns nothing is not counted.
    fn work(&self) {
        let buffer = self.used(&self.waiting);
        let grown = self.count(buffer.grow(2 * G)).unwrap();
        self.count(grown.copy_from_host(G, &[7; 64])).unwrap();
        let mut seen = [0; 64];
        self.count(grown.copy_to_host_on(&self.stream, G, &mut seen)).unwrap();
        assert_eq!(seen, [7; 64]);
        self.count(buffer.close()).unwrap();
        let shorter = self.count(grown.truncate_into(G)).unwrap();
        self.count(shorter.close_within(after(Duration::from_secs(30)))).unwrap();
        drop(self.used(&self.waiting));
        self.used(&self.waiting).close_deferred();
        let again = self.used(&self.deferring);
        drop(self.count(again.grow(G)).unwrap());
        drop(self.count(again.grow_into(2 * G)).unwrap());
        // What is pending may stay that, and what is asked of it is no matter of captures.
        match self.count(self.deferring.drain(after(Duration::ZERO))) {
            Ok(()) | Err(Error::StillPending { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        self.count(self.release.synchronize()).unwrap();
    }

    fn finish(&self) -> usize {
        drain(&self.waiting);
        drain(&self.deferring);
        self.done.load(Ordering::Relaxed)
    }
}

fn ten_thousand_operations_harm_no_capture(backend: &Backend) {
    const OPERATIONS: usize = 10_000;
    let captured = scratch(backend);
    let worker = Worker::new(backend);
    let streams = [Stream::non_blocking(&backend.device), Stream::blocking(&backend.device)];
    let combinations = streams.len() * MODES.len() * 2;
    for (index, (stream, mode)) in streams.iter().flat_map(|stream| MODES.map(|mode| (stream, mode))).enumerate() {
        for (nth, by_another) in [false, true].into_iter().enumerate() {
            let goal = OPERATIONS * (2 * index + nth + 1) / combinations;
            while worker.done.load(Ordering::Relaxed) < goal {
                let capture = Capture::begin(stream, mode, &captured);
                let work = || (0..5).for_each(|_| worker.work());
                if by_another {
                    thread::scope(|scope| scope.spawn(work).join().unwrap());
                } else {
                    work();
                }
                capture.end();
            }
        }
    }
    assert!(worker.finish() >= OPERATIONS);
    captured.close().unwrap();
    backend.require_clean();
}

fn operations_harm_no_captures_that_come_and_go(backend: &Backend) {
    const CAPTURES: usize = 300;
    let captured = scratch(backend);
    let worker = Worker::new(backend);
    let streams = [Stream::non_blocking(&backend.device), Stream::blocking(&backend.device)];
    thread::scope(|scope| {
        let capturing = streams.each_ref().map(|stream| {
            let captured = &captured;
            scope.spawn(move || {
                for round in 0..CAPTURES {
                    Capture::begin(stream, MODES[round % MODES.len()], captured).end();
                    thread::yield_now();
                }
            })
        });
        while !capturing.iter().all(ScopedJoinHandle::is_finished) {
            worker.work();
        }
    });
    assert!(worker.finish() > 0);
    captured.close().unwrap();
    backend.require_clean();
}

fn waits_for_work_that_goes_on_harm_no_capture(backend: &Backend) {
    let captured = scratch(backend);
    let stream = Stream::non_blocking(&backend.device);
    let ends: [fn(VirtualMemoryBuffer); 4] = [
        drop,
        |buffer| buffer.close().unwrap(),
        |buffer| buffer.close_within(after(Duration::from_secs(30))).unwrap(),
        VirtualMemoryBuffer::close_deferred,
    ];
    for mode in MODES {
        for end in ends {
            let busy = Stream::non_blocking(&backend.device);
            let resource = backend.resource();
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(Release::Stream(busy.clone())).unwrap();
            let gate = Gate::close(&busy);
            queue_fill(&busy, &buffer, 1);
            let capture = Capture::begin(&stream, mode, &captured);
            gate.open_after(Duration::from_millis(20), || end(buffer));
            drain(&resource);
            assert!(is_idle(&busy));
            capture.end();
        }
    }
    captured.close().unwrap();
    backend.require_all_gone();
}
