//! Streams that are shared, and what a buffer waits for: who keeps them, until when, and what is never run under a
//! lock.
//!
//! # Safety
//! Streams and contexts are the tests' own, alive while they are named; host functions touch what outlives them.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use cuvmm_driver::sys::{CUcontext, CUdevice, CUstream, CUstream_flags};
use cuvmm_driver::{CUresult, Call, StrandedKind};
use cuvmm_resource::{Error, Options, Outcome, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_sim::{Hints, Machine, When};
use support::work::{Foreign, Held, in_primary, is_done};
use support::{Bench, G};

#[test]
fn a_stream_of_ours_lives_as_long_as_a_share_of_it() {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let share = stream.clone();
    assert_eq!((stream.driver(), stream.is_default()), (&bench.driver, false));
    assert_eq!(stream, share);
    assert_ne!(stream, StreamRef::create(&bench.device()).unwrap());
    drop(stream);
    assert_eq!((bench.simulator.live().streams, bench.simulator.live().contexts), (1, 1));
    share.synchronize().unwrap();
    drop(share);
    bench.assert_clean();
    assert_eq!(bench.driver.ctx_get_current().unwrap(), CUcontext::NULL);
}

#[test]
fn a_stream_that_is_not_made_leaves_nothing() {
    for call in [
        Call::cuDevicePrimaryCtxRetain,
        Call::cuThreadExchangeStreamCaptureMode,
        Call::cuCtxPushCurrent,
        Call::cuStreamCreate,
    ] {
        for code in [CUresult::OUT_OF_MEMORY, CUresult::UNKNOWN] {
            let bench = Bench::small();
            bench.faults.fail(call, 1, code, When::Before);
            let error = StreamRef::create(&bench.device()).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(call), Some(code)));
            bench.assert_clean();
            assert_eq!(bench.driver.ctx_get_current().unwrap(), CUcontext::NULL);
        }
    }
}

#[test]
fn what_a_stream_can_not_give_back_is_counted_and_told_to_nobody() {
    let bench = Bench::small();
    bench.faults.fail(Call::cuStreamDestroy, 1, CUresult::UNKNOWN, When::Before);
    bench.faults.fail(Call::cuDevicePrimaryCtxRelease, 1, CUresult::UNKNOWN, When::Before);
    drop(StreamRef::create(&bench.device()).unwrap());
    assert_eq!(bench.driver.stranded().count(StrandedKind::Other), 2);
    assert_eq!(bench.driver.stranded().total(), 2);
}

#[test]
fn an_owner_stays_until_the_last_buffer_lets_go() {
    let bench = Bench::small();
    let owner = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
    let dropped = owner.dropped.clone();
    let stream = StreamRef::from_owner(owner).unwrap();
    let resource = bench.resource(Options::new().release(Release::Stream(stream)));
    let first = resource.allocate(G).unwrap();
    let second = first.grow(2 * G).unwrap();
    drop(resource);
    first.close().unwrap();
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    let Release::Stream(stream) = second.released_after() else { panic!("{:?}", second.released_after()) };
    stream.synchronize().unwrap();
    drop(stream);
    second.close().unwrap();
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    bench.assert_clean();
}

#[test]
fn a_raw_stream_stays_its_makers() {
    let bench = Bench::small();
    let owner = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
    // SAFETY: the owner outlives it.
    let stream = unsafe { StreamRef::from_raw(&bench.driver, owner.stream) }.unwrap();
    assert_eq!(stream.as_raw(), owner.stream);
    assert_eq!(stream, StreamRef::from_owner(owner.clone()).unwrap(), "the same stream, however it is kept");
    let buffer = bench.plain().allocate(G).unwrap();
    buffer.set_release(Release::Stream(stream)).unwrap();
    let held = Held::queue(owner.stream, &buffer).let_go_soon();
    buffer.close().unwrap();
    held.join().unwrap();
    assert_eq!(bench.simulator.live().streams, 1);
    drop(owner);
    bench.assert_clean();
}

/// As a release stream, a token of a default stream is the legacy default stream, which waits for all blocking ones.
#[test]
fn a_token_counts_as_none_given() {
    for token in [CUstream::NULL, CUstream::LEGACY, CUstream::PER_THREAD] {
        let bench = Bench::small();
        // SAFETY: a token names no stream that could go.
        let stream = unsafe { StreamRef::from_raw(&bench.driver, token) }.unwrap();
        assert!(stream.is_default() && stream.as_raw() == token);
        let blocking = Foreign::new(&bench, CUstream_flags::DEFAULT);
        let buffer = bench.resource(Options::new().release(Release::Stream(stream))).allocate(G).unwrap();
        let held = Held::queue(blocking.stream, &buffer).let_go_soon();
        buffer.close().unwrap();
        held.join().unwrap();
        drop(blocking);
        bench.assert_clean();
    }
}

#[test]
fn values_of_another_driver_are_refused_and_change_nothing() {
    let [bench, other] = [Bench::small(), Bench::small()];
    let buffer = bench.plain().allocate(G).unwrap();
    let theirs = StreamRef::create(&other.device()).unwrap();
    let refused = Error::Driver(cuvmm_driver::Error::DifferentDrivers);
    bench.simulator.clear_calls();
    other.simulator.clear_calls();
    assert_eq!(buffer.set_release(Release::Stream(theirs.clone())), Err(refused.clone()));
    assert!(matches!(buffer.released_after(), Release::DefaultStream));
    assert_eq!(buffer.fence(&theirs), Err(refused.clone()));
    assert_eq!(buffer.fill_on(&theirs, 0, 1, 1), Err(refused.clone()));
    assert_eq!(buffer.copy_from_host_on(&theirs, 0, &[1]), Err(refused.clone()));
    assert_eq!(buffer.copy_to_host_on(&theirs, 0, &mut [1]), Err(refused.clone()));
    let (error, buffer) = buffer.close_on(&theirs).unwrap_err().into_parts();
    assert_eq!(error, refused);
    bench.assert_no_call();
    other.assert_no_call();
    buffer.unwrap().close().unwrap();
    bench.assert_clean();
}

#[test]
fn the_resources_own_stream_is_made_once_and_when_it_is_needed() {
    let bench = Bench::small();
    let resource = bench.plain();
    let buffers = [(); 4].map(|()| resource.allocate(G).unwrap());
    assert_eq!(bench.simulator.live().streams, 0, "nobody needed one");
    std::thread::scope(|scope| {
        for buffer in &buffers {
            scope.spawn(|| {
                for value in 0..20 {
                    buffer.fill(0, G, value).unwrap();
                    let mut byte = [0];
                    buffer.copy_to_host(G - 1, &mut byte).unwrap();
                    assert_eq!(byte, [value]);
                }
            });
        }
    });
    assert_eq!(bench.simulator.live().streams, 1);
    drop(resource);
    assert_eq!(bench.simulator.live().streams, 1, "the buffers need it");
    drop(buffers);
    bench.assert_clean();
}

#[test]
fn a_stream_that_could_not_be_made_is_made_next_time() {
    let bench = Bench::small();
    let buffer = bench.plain().allocate(G).unwrap();
    bench.faults.fail(Call::cuStreamCreate, 1, CUresult::OUT_OF_MEMORY, When::Before);
    let error = buffer.fill(0, 1, 1).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuStreamCreate), Some(CUresult::OUT_OF_MEMORY)));
    buffer.fill(0, 1, 1).unwrap();
    drop(buffer);
    bench.assert_clean();
}

#[test]
fn ranges_beyond_the_buffer_reach_no_driver() {
    let bench = Bench::small();
    let buffer = bench.plain().allocate(2 * G).unwrap();
    let size = 2 * G;
    bench.simulator.clear_calls();
    for (offset, bytes) in [(0, size + 1), (size, 1), (size + 1, 0), (usize::MAX, 1), (usize::MAX, 0), (1, size)] {
        let refused = Err(Error::OutOfBounds { offset, bytes, size });
        assert_eq!(buffer.fill(offset, bytes, 1), refused);
        let mut host = vec![0; bytes];
        assert_eq!(buffer.copy_from_host(offset, &host), refused);
        assert_eq!(buffer.copy_to_host(offset, &mut host), refused);
    }
    assert_eq!(buffer.fill(1, usize::MAX, 1), Err(Error::OutOfBounds { offset: 1, bytes: usize::MAX, size }));
    buffer.fill(size, 0, 1).unwrap();
    buffer.copy_from_host(size, &[]).unwrap();
    bench.assert_no_call();
}

/// A copy on a default stream's token comes behind what is queued on that stream.
#[test]
fn a_copy_on_a_token_comes_behind_its_work() {
    for token in [CUstream::NULL, CUstream::LEGACY, CUstream::PER_THREAD] {
        let bench = Bench::small();
        let buffer = bench.plain().allocate(G).unwrap();
        buffer.fill(0, G, 1).unwrap();
        // SAFETY: a token names no stream that could go.
        let stream = unsafe { StreamRef::from_raw(&bench.driver, token) }.unwrap();
        let mut byte = [0];
        in_primary(&bench.device(), |_| {
            let held = Held::queue(token, &buffer).let_go_soon();
            buffer.copy_to_host_on(&stream, 0, &mut byte).unwrap();
            held.join().unwrap();
        });
        assert_eq!(byte, [7]);
        buffer.close().unwrap();
        bench.assert_clean();
    }
}

/// A token names another stream on another thread: no fence replaces one of another thread.
#[test]
fn fences_on_the_default_streams_of_threads_are_all_waited_for() {
    let bench = Bench::small();
    let device = bench.device();
    let buffer = bench.resource(Options::new().release(Release::Caller)).allocate(G).unwrap();
    // SAFETY: a token names no stream that could go.
    let token = unsafe { StreamRef::from_raw(&bench.driver, CUstream::PER_THREAD) }.unwrap();
    // The context that the fences are in stays.
    device.primary_ctx_retain().unwrap();
    in_primary(&device, |_| {
        let held = Held::queue(CUstream::PER_THREAD, &buffer);
        buffer.fence(&token).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| in_primary(&device, |_| buffer.fence(&token).unwrap()));
        });
        let held = held.let_go_soon();
        buffer.close().unwrap();
        held.join().unwrap();
    });
    // SAFETY: the share is this test's.
    unsafe { device.primary_ctx_release() }.unwrap();
    bench.assert_clean();
}

#[test]
fn a_fence_on_a_stream_replaces_the_one_before() {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let buffer = bench.plain().allocate(G).unwrap();
    for _ in 0..100 {
        buffer.fence(&stream).unwrap();
    }
    assert_eq!(bench.simulator.live().events, 1);
    let held = Held::queue(stream.as_raw(), &buffer);
    buffer.fence(&stream).unwrap();
    let held = held.let_go_soon();
    drop(stream);
    buffer.close().unwrap();
    held.join().unwrap();
    bench.assert_clean();
}

#[test]
fn a_fence_that_fails_leaves_nothing() {
    for call in [
        Call::cuThreadExchangeStreamCaptureMode,
        Call::cuCtxPushCurrent,
        Call::cuStreamIsCapturing,
        Call::cuEventCreate,
        Call::cuEventRecord,
    ] {
        let bench = Bench::small();
        let stream = StreamRef::create(&bench.device()).unwrap();
        let buffer = bench.plain().allocate(G).unwrap();
        bench.faults.fail(call, 1, CUresult::UNKNOWN, When::Before);
        assert_eq!(buffer.fence(&stream).unwrap_err().call(), Some(call));
        assert_eq!(bench.simulator.live().events, 0);
        buffer.fence(&stream).unwrap();
        drop((stream, buffer));
        bench.assert_clean();
    }
}

/// A buffer that a failed grow hands back still waits for all that it was to wait for.
#[test]
fn a_failed_grow_into_uses_up_no_fence() {
    let bench = Bench::new(Machine::small().hints(Hints::Refused(CUresult::INVALID_VALUE)));
    let stream = StreamRef::create(&bench.device()).unwrap();
    let buffer = bench.plain().allocate(G).unwrap();
    let held = Held::queue(stream.as_raw(), &buffer);
    buffer.fence(&stream).unwrap();
    bench.faults.fail(Call::cuEventSynchronize, 1, CUresult::UNKNOWN, When::Before);
    let (error, buffer) = buffer.grow_into(40 << 20).unwrap_err().into_parts();
    assert_eq!((error.call(), error.code()), (Some(Call::cuEventSynchronize), Some(CUresult::UNKNOWN)));
    assert_eq!((buffer.size(), buffer.outcome()), (G, None));
    let held = held.let_go_soon();
    buffer.close().unwrap();
    held.join().unwrap();
    drop(stream);
    bench.assert_clean();
}

#[test]
fn a_moving_grow_into_waits_and_one_in_place_does_not() {
    for (hints, moves) in [(Hints::Granted, false), (Hints::Refused(CUresult::INVALID_VALUE), true)] {
        let bench = Bench::new(Machine::small().hints(hints));
        let stream = StreamRef::create(&bench.device()).unwrap();
        let buffer = bench.resource(Options::new().release(Release::Stream(stream.clone()))).allocate(G).unwrap();
        let held = Held::queue(stream.as_raw(), &buffer);
        let (grown, held) = if moves {
            let held = held.let_go_soon();
            (buffer.grow_into(40 << 20).unwrap(), Some(held))
        } else {
            let grown = buffer.grow_into(40 << 20).unwrap();
            assert!(!is_done(&stream), "nothing was waited for");
            (grown, Some(held.let_go_soon()))
        };
        assert_eq!(grown.outcome(), Some(if moves { Outcome::Moved } else { Outcome::InPlace }));
        grown.close().unwrap();
        held.unwrap().join().unwrap();
        drop(stream);
        bench.assert_clean();
    }
}

/// An owner that is let go of may look at the buffer that it was given to.
#[test]
fn an_owner_is_dropped_under_no_lock() {
    let bench = Bench::small();
    let buffer = Arc::new(bench.plain().allocate(G).unwrap());
    let owner = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
    let (sender, receiver) = channel();
    let looks: Weak<VirtualMemoryBuffer> = Arc::downgrade(&buffer);
    *owner.last.lock().unwrap() = Some(Box::new(move || {
        let buffer = looks.upgrade().unwrap();
        let _ = sender.send(matches!(buffer.released_after(), Release::Caller));
    }));
    buffer.set_release(Release::Stream(StreamRef::from_owner(owner).unwrap())).unwrap();
    let share = buffer.clone();
    std::thread::spawn(move || share.set_release(Release::Caller).unwrap());
    assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok(true), "neither a deadlock nor the old one");
}

/// In a host function of the driver's nothing but the one question is asked, whatever goes with the buffer.
#[test]
fn a_drop_in_a_host_function_makes_one_call() {
    static LAST: Mutex<Option<VirtualMemoryBuffer>> = Mutex::new(None);
    unsafe extern "C" fn let_go(_: *mut c_void) {
        if let Ok(mut last) = LAST.lock() {
            drop(last.take());
        }
    }
    let bench = Bench::small();
    // All that the buffer is to wait for by is its own: the streams would go with it.
    let buffer = bench.plain().allocate(G).unwrap();
    buffer.fill(0, G, 1).unwrap();
    let stream = StreamRef::create(&bench.device()).unwrap();
    buffer.fence(&stream).unwrap();
    buffer.set_release(Release::Stream(StreamRef::create(&bench.device()).unwrap())).unwrap();
    drop(stream);
    *LAST.lock().unwrap() = Some(buffer);

    let runner = StreamRef::create(&bench.device()).unwrap();
    in_primary(&bench.device(), |driver| {
        // SAFETY: the stream is alive, and the function touches statics alone.
        unsafe { driver.launch_host_func(runner.as_raw(), Some(let_go), std::ptr::null_mut()) }.unwrap();
    });
    runner.synchronize().unwrap();
    let refused: Vec<Call> = bench.simulator.violations().into_iter().map(|violation| violation.call).collect();
    assert_eq!(refused, [Call::cuCtxGetCurrent]);
    bench.simulator.clear_violations();
    drop(runner);
    bench.assert_clean_soon();
}

/// Whether the context is active is not known then; its work is waited for, and the failure told.
#[test]
fn a_driver_that_does_not_say_whether_its_context_is_active_is_waited_for() {
    let bench = Bench::small();
    let buffer = bench.plain().allocate(G).unwrap();
    let blocking = Foreign::new(&bench, CUstream_flags::DEFAULT);
    let held = Held::queue(blocking.stream, &buffer).let_go_soon();
    bench.faults.fail(Call::cuDevicePrimaryCtxGetState, 1, CUresult::UNKNOWN, When::Before);
    let (error, buffer) = buffer.close().unwrap_err().into_parts();
    assert_eq!((error.call(), error.code()), (Some(Call::cuDevicePrimaryCtxGetState), Some(CUresult::UNKNOWN)));
    assert!(buffer.is_none());
    held.join().unwrap();
    drop(blocking);
    bench.assert_clean();
}

/// A driver crashes when it is asked whether such a stream captures.
#[test]
fn a_stream_whose_context_was_reset_is_not_asked_for_a_capture() {
    let bench = Bench::small();
    let buffer = bench.plain().allocate(G).unwrap();
    let stream = StreamRef::create(&bench.device()).unwrap();
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    // SAFETY: a number alone; nothing runs.
    assert_eq!(unsafe { bench.driver.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }, CUresult::SUCCESS);
    let (error, buffer) = buffer.close().unwrap_err().into_parts();
    assert_eq!((error.code(), buffer.is_none()), (Some(CUresult::CONTEXT_IS_DESTROYED), true));
    assert_eq!(bench.simulator.live().mappings, 0);
    assert!(bench.simulator.violations().is_empty());
    drop(stream);
}
