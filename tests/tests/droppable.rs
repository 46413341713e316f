//! A buffer can be dropped by anyone, at any time: under queued work, while its stream waits for the thread that drops, and
//! whatever is current.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::{CUcontext, CUstreamCaptureMode};
use cuvmm::{
    CUresult, Call, Driver, GrowOptions, OnDrop, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_resource::Error;
use cuvmm_sim::faults::When;
use cuvmm_tests::{
    Backend, Current, G, Gate, MODES, Owner, ROOM, Ranges, Spin, Stream, after, buffer_on, drain, is_idle,
    occupy_behind, queue_fill, require_marks, write_marks,
};

cuvmm_tests::suite!(
    every_path_to_an_unmap_waits_for_work_on_the_release_stream,
    every_path_to_an_unmap_waits_for_work_on_a_fenced_stream,
    every_path_to_an_unmap_waits_for_work_on_the_stream_of_an_alias,
    a_rollback_leaves_the_work_on_what_was_there_alone,
    a_rollback_waits_for_the_work_on_what_it_gives_back,
    a_stream_that_waits_for_the_thread_that_drops_gets_on,
    a_stream_that_waits_for_the_thread_that_drops_deferred_gets_on_at_once,
    a_stream_that_waits_for_the_thread_that_grows_gets_on,
    closing_within_a_deadline_gives_the_buffer_back,
    dropped_where_a_context_is_current_that_is_gone,
    the_context_and_the_capture_mode_of_no_thread_change,
    the_end_of_a_streams_owner_finds_nothing_of_the_librarys,
);

cuvmm_tests::suite!(two gpus: dropped_where_another_devices_context_is_current);

/// How long what waits for nothing may take on a machine that is busy: less than a drop waits in vain.
const AT_ONCE: Duration = Duration::from_secs(1);
/// How long a drop may take whatever happens.
const SOON: Duration = Duration::from_secs(5);

fn resource(backend: &Backend, on_drop: OnDrop) -> VirtualMemoryResource {
    backend.resource_with(Options::new().on_drop(on_drop))
}

/// The same memory once more, that waits for nothing.
fn alias_of(buffer: &VirtualMemoryBuffer) -> VirtualMemoryBuffer {
    let alias = buffer.grow(buffer.size()).unwrap();
    alias.set_release(Release::Caller).unwrap();
    alias
}

/// A way that a buffer's memory is left.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Path {
    Drop,
    Close,
    CloseWithin,
    CloseDeferred,
    DropDeferred,
    Move,
    MoveDeferred,
}

impl Path {
    const ALL: [Self; 7] = [
        Self::Drop,
        Self::Close,
        Self::CloseWithin,
        Self::CloseDeferred,
        Self::DropDeferred,
        Self::Move,
        Self::MoveDeferred,
    ];

    fn on_drop(self) -> OnDrop {
        if matches!(self, Self::DropDeferred | Self::MoveDeferred) { OnDrop::Defer } else { OnDrop::Wait }
    }

    fn moves(self) -> bool {
        matches!(self, Self::Move | Self::MoveDeferred)
    }

    /// Takes it, and must move where it is to: what is behind the buffer is taken.
    #[track_caller]
    fn take(self, buffer: VirtualMemoryBuffer) {
        let outcome = self.take_either_way(buffer);
        assert!(!self.moves() || outcome == Some(Outcome::Moved), "{outcome:?}");
    }

    /// As [`take`](Self::take), where others may give back what is behind the buffer, which then grows where it is. The
    /// outcome, where it grows.
    fn take_either_way(self, buffer: VirtualMemoryBuffer) -> Option<Outcome> {
        match self {
            Self::Drop | Self::DropDeferred => drop(buffer),
            Self::Close => buffer.close().unwrap(),
            Self::CloseWithin => buffer.close_within(after(Duration::from_secs(30))).unwrap(),
            Self::CloseDeferred => buffer.close_deferred(),
            Self::Move | Self::MoveDeferred => {
                let grown = buffer.grow_into(ROOM + G).unwrap();
                let outcome = grown.outcome();
                grown.close().unwrap();
                return outcome;
            }
        }
        None
    }
}

/// Which of a buffer's aliases works, and how that is known to wait for it.
#[derive(Clone, Copy)]
enum Work {
    ReleaseStream,
    FencedStream,
    AnAliass,
}

/// Takes every path with a buffer and an alias of it, in both orders, while work on the memory is held up and then runs for a
/// while.
fn take_every_path(backend: &Backend, work: Work) {
    let spin = Spin::load(&backend.device);
    for path in Path::ALL {
        let resource = resource(backend, path.on_drop());
        for is_alias_first in [false, true] {
            let stream = Stream::non_blocking(&backend.device);
            let buffer = resource.allocate(G).unwrap();
            let alias = alias_of(&buffer);
            buffer.set_release(Release::Caller).unwrap();
            match work {
                Work::ReleaseStream => buffer.set_release(Release::Stream(stream.clone())).unwrap(),
                Work::AnAliass => alias.set_release(Release::Stream(stream.clone())).unwrap(),
                Work::FencedStream => {}
            }
            let ranges = Ranges::of(&buffer);
            let occupied = if path.moves() { occupy_behind(&buffer) } else { None };
            let gate = Gate::close(&stream);
            queue_fill(&stream, &buffer, 1);
            spin.queue(&stream, buffer.address(), Duration::from_millis(10));
            queue_fill(&stream, &buffer, 2);
            if let Work::FencedStream = work {
                buffer.fence(&stream).unwrap();
            }
            gate.open_after(Duration::from_millis(10), || {
                let (first, last) = if is_alias_first { (alias, buffer) } else { (buffer, alias) };
                // Where both move, the second does so to where the first was.
                path.take(first);
                path.take(last);
            });
            drain(&resource);
            drop(occupied);
            // The work ended well, on memory that was there.
            assert!(is_idle(&stream), "{path:?}");
            stream.synchronize().unwrap();
            backend.require_gone(&ranges);
            backend.require_clean();
        }
    }
}

fn every_path_to_an_unmap_waits_for_work_on_the_release_stream(backend: &Backend) {
    take_every_path(backend, Work::ReleaseStream);
}

fn every_path_to_an_unmap_waits_for_work_on_a_fenced_stream(backend: &Backend) {
    take_every_path(backend, Work::FencedStream);
}

fn every_path_to_an_unmap_waits_for_work_on_the_stream_of_an_alias(backend: &Backend) {
    take_every_path(backend, Work::AnAliass);
}

fn a_rollback_leaves_the_work_on_what_was_there_alone(backend: &Backend) {
    for on_drop in [OnDrop::Wait, OnDrop::Defer] {
        let resource = resource(backend, on_drop);
        let stream = Stream::non_blocking(&backend.device);
        let mut buffer = buffer_on(&resource, &stream);
        let occupied = occupy_behind(&buffer);
        let gate = Gate::close(&stream);
        queue_fill(&stream, &buffer, 0x44);
        let mark = backend.mark();
        // In a move: at the new addresses of the old memory, and of the memory that is added.
        for call in [Call::cuMemMap, Call::cuMemSetAccess] {
            for nth in [1, 2] {
                backend.faults.fail(call, nth, CUresult::UNKNOWN, When::Before);
                let (error, back) = buffer.grow_into(ROOM + G).unwrap_err().into_parts();
                assert_eq!(error.code(), Some(CUresult::UNKNOWN));
                buffer = back;
                drain(&resource);
                backend.require_unchanged(&mark);
                assert!(!is_idle(&stream), "it waited");
            }
        }
        gate.open();
        stream.synchronize().unwrap();
        let mut seen = [0; 16];
        buffer.copy_to_host(G - 16, &mut seen).unwrap();
        assert_eq!(seen, [0x44; 16]);
        drop(occupied);
        buffer.close().unwrap();
    }
    backend.faults.clear();
}

fn a_rollback_waits_for_the_work_on_what_it_gives_back(backend: &Backend) {
    for on_drop in [OnDrop::Wait, OnDrop::Defer] {
        let resource = resource(backend, on_drop);
        let buffer = resource.allocate_zeroed(G).unwrap();
        let mark = backend.mark();
        // The zeros are queued, and the wait for them fails.
        backend.faults.fail(Call::cuStreamSynchronize, 1, CUresult::UNKNOWN, When::Before);
        let error = buffer.grow_with(4 * ROOM, &GrowOptions::new().zeroed()).unwrap_err();
        assert_eq!(error.code(), Some(CUresult::UNKNOWN));
        drain(&resource);
        backend.require_unchanged(&mark);
        backend.require_clean();
        // No failure of the work's own is left behind.
        write_marks(&buffer, 5);
        require_marks(&buffer, 5, G);
        buffer.close().unwrap();
    }
    backend.faults.clear();
}

/// How long `work` took, and what it returned.
fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let begin = Instant::now();
    let result = work();
    (begin.elapsed(), result)
}

fn a_stream_that_waits_for_the_thread_that_drops_gets_on(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    let buffer = buffer_on(&resource, &stream);
    let gate = Gate::close(&stream);
    queue_fill(&stream, &buffer, 6);
    let ranges = Ranges::of(&buffer);
    let (took, ()) = timed(|| drop(buffer));
    assert!(took < SOON, "{took:?}");
    // Its memory is there for what is still to come.
    assert_eq!((resource.pending(), backend.ledger.live().mappings, is_idle(&stream)), (1, 1, false));
    gate.open();
    drain(&resource);
    stream.synchronize().unwrap();
    backend.require_gone(&ranges);
}

fn a_stream_that_waits_for_the_thread_that_drops_deferred_gets_on_at_once(backend: &Backend) {
    let resource = resource(backend, OnDrop::Defer);
    for end in [drop, VirtualMemoryBuffer::close_deferred] {
        let stream = Stream::non_blocking(&backend.device);
        let buffer = buffer_on(&resource, &stream);
        let gate = Gate::close(&stream);
        queue_fill(&stream, &buffer, 7);
        let (took, ()) = timed(|| end(buffer));
        assert!(took < AT_ONCE, "{took:?}");
        assert_eq!((resource.pending(), is_idle(&stream)), (1, false));
        gate.open();
        drain(&resource);
        stream.synchronize().unwrap();
    }
    backend.require_all_gone();
}

fn a_stream_that_waits_for_the_thread_that_grows_gets_on(backend: &Backend) {
    let resource = resource(backend, OnDrop::Defer);
    let stream = Stream::non_blocking(&backend.device);
    let buffer = buffer_on(&resource, &stream);
    let occupied = occupy_behind(&buffer);
    let gate = Gate::close(&stream);
    queue_fill(&stream, &buffer, 0x55);
    let (took, moved) = timed(|| buffer.grow_into(ROOM + G).unwrap());
    assert!(took < AT_ONCE, "{took:?}");
    assert_eq!((moved.outcome(), resource.pending(), is_idle(&stream)), (Some(Outcome::Moved), 1, false));
    gate.open();
    drain(&resource);
    drop(occupied);
    let mut seen = [0; 16];
    moved.copy_to_host(G - 16, &mut seen).unwrap();
    assert_eq!(seen, [0x55; 16]);
    drop(moved);
    drain(&resource);
    backend.require_all_gone();
}

fn closing_within_a_deadline_gives_the_buffer_back(backend: &Backend) {
    let resource = backend.resource();
    for is_fenced in [false, true] {
        let stream = Stream::non_blocking(&backend.device);
        let mut buffer = resource.allocate(G).unwrap();
        write_marks(&buffer, 8);
        let release = if is_fenced { Release::Caller } else { Release::Stream(stream.clone()) };
        buffer.set_release(release).unwrap();
        let gate = Gate::close(&stream);
        if is_fenced {
            buffer.fence(&stream).unwrap();
        }
        let mark = backend.mark();
        for patience in [0, 50] {
            let patience = Duration::from_millis(patience);
            let (took, closed) = timed(|| buffer.close_within(after(patience)));
            assert!(took >= patience && took < AT_ONCE, "{took:?}");
            let (error, back) = closed.unwrap_err().into_parts();
            assert_eq!(error, Error::DeadlinePassed);
            buffer = back.expect("the buffer");
            backend.require_unchanged(&mark);
        }
        assert!(!is_idle(&stream));
        // It is as it was: read, written and grown.
        require_marks(&buffer, 8, G);
        let buffer = buffer.grow_into(2 * G).unwrap();
        write_marks(&buffer, 9);
        gate.open();
        stream.synchronize().unwrap();
        require_marks(&buffer, 9, 2 * G);
        buffer.close_within(after(Duration::from_secs(30))).unwrap();
    }
    assert_eq!(resource.pending(), 0);
    backend.require_all_gone();
}

fn dropped_where_a_context_is_current_that_is_gone(backend: &Backend) {
    for on_drop in [OnDrop::Wait, OnDrop::Defer] {
        let resource = resource(backend, on_drop);
        for release in [Release::DefaultStream, Release::Caller] {
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(release).unwrap();
            let current = Current::push(&backend.device);
            let context = current.context;
            current.leave_behind();
            assert!(!backend.device.primary_ctx_is_active().unwrap(), "somebody else has a share of the context");
            drop(buffer);
            drain(&resource);
            assert_eq!(backend.driver.ctx_get_current().unwrap(), context);
            Current::forget(&backend.driver);
        }
    }
    backend.require_all_gone();
}

fn dropped_where_another_devices_context_is_current(backend: &Backend) {
    let current = Current::push(&backend.driver.device(1).unwrap());
    for path in Path::ALL {
        let resource = resource(backend, path.on_drop());
        let stream = Stream::non_blocking(&backend.device);
        for release in [Release::Stream(stream.clone()), Release::DefaultStream, Release::Caller] {
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(release).unwrap();
            let occupied = if path.moves() { occupy_behind(&buffer) } else { None };
            let gate = Gate::close(&stream);
            queue_fill(&stream, &buffer, 7);
            buffer.fence(&stream).unwrap();
            gate.open_after(Duration::from_millis(5), || path.take(buffer));
            assert_eq!(backend.driver.ctx_get_current().unwrap(), current.context);
            drain(&resource);
            drop(occupied);
        }
        stream.synchronize().unwrap();
    }
    backend.require_all_gone();
}

/// What this thread has current, and its capture mode, which is left as it is.
fn condition(driver: &Driver) -> (CUcontext, CUstreamCaptureMode) {
    let mode = driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::RELAXED).unwrap();
    let _relaxed = driver.thread_exchange_stream_capture_mode(mode).unwrap();
    (driver.ctx_get_current().unwrap(), mode)
}

/// Everything that ends a buffer, beside everything that the library's thread then does.
fn end_buffers(backend: &Backend) {
    for path in Path::ALL {
        let resource = resource(backend, path.on_drop());
        let stream = Stream::non_blocking(&backend.device);
        for release in [Release::Stream(stream.clone()), Release::DefaultStream, Release::Caller] {
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(release).unwrap();
            queue_fill(&stream, &buffer, 4);
            buffer.fence(&stream).unwrap();
            let occupied = if path.moves() { occupy_behind(&buffer) } else { None };
            let _outcome = path.take_either_way(buffer);
            drop(occupied);
        }
        drain(&resource);
    }
}

fn the_context_and_the_capture_mode_of_no_thread_change(backend: &Backend) {
    thread::scope(|scope| {
        let mut bystanders = Vec::new();
        for mode in MODES {
            for has_context in [false, true] {
                let (go, gone) = channel::<()>();
                let (ready, begun) = channel();
                let bystander = scope.spawn(move || {
                    let current = has_context.then(|| Current::push(&backend.device));
                    let context = current.as_ref().map_or(CUcontext::NULL, |current| current.context);
                    let _default = backend.driver.thread_exchange_stream_capture_mode(mode).unwrap();
                    // Its own drops leave it as it is, and those of the other threads too.
                    end_buffers(backend);
                    assert_eq!(condition(&backend.driver), (context, mode));
                    ready.send(()).unwrap();
                    gone.recv().unwrap();
                    assert_eq!(condition(&backend.driver), (context, mode));
                });
                bystanders.push((bystander, begun, go));
            }
        }
        for (_, begun, _) in &bystanders {
            begun.recv().unwrap();
        }
        end_buffers(backend);
        for (bystander, _, go) in bystanders {
            go.send(()).unwrap();
            bystander.join().unwrap();
        }
    });
}

fn the_end_of_a_streams_owner_finds_nothing_of_the_librarys(backend: &Backend) {
    let resource = resource(backend, OnDrop::Defer);
    let (sender, receiver) = channel();
    let driver = backend.driver.clone();
    let look = move || sender.send((thread::current().id(), condition(&driver))).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    let owner = Owner::share(&stream, look);
    let buffer = buffer_on(&resource, &owner);
    queue_fill(&stream, &buffer, 5);
    drop((buffer, owner));
    let (thread, found) = receiver.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_ne!(thread, thread::current().id(), "on a thread that waits for nobody");
    assert_eq!(found, (CUcontext::NULL, CUstreamCaptureMode::GLOBAL));
    drain(&resource);
}
