//! Fences: how many a buffer keeps, what keeps their contexts, and captures that begin beside them.
//!
//! # Safety
//! Streams and contexts are the tests' own, alive while they are named; what is captured is never launched.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::{CUcontext, CUdevice, CUstream, CUstreamCaptureMode};
use cuvmm_driver::{CUresult, Call, Driver};
use cuvmm_resource::{CloseError, Error, Options, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_sim::When;
use support::work::{Held, in_primary, is_done, token};
use support::{Bench, G};

/// A buffer that waits for its fences alone.
fn unattended(bench: &Bench) -> VirtualMemoryBuffer {
    bench.resource(Options::new().release(Release::Caller)).allocate(G).unwrap()
}

/// Begins a capture on the stream before the next call of that name, on another thread.
fn capture_before_next(bench: &Bench, call: Call, stream: &StreamRef) {
    let driver = bench.driver.clone();
    let stream = stream.clone();
    bench.meanwhile.before_next(call, move || {
        let begin = move || {
            // SAFETY: the stream is alive while it is shared.
            unsafe { driver.stream_begin_capture(stream.as_raw(), CUstreamCaptureMode::RELAXED) }
        };
        std::thread::spawn(begin).join().unwrap().unwrap();
    });
}

/// Ends the capture on the stream, and demands that nothing had killed it.
#[track_caller]
fn end_capture(driver: &Driver, stream: &StreamRef) {
    // SAFETY: the stream is alive.
    let graph = unsafe { driver.stream_end_capture(stream.as_raw()) }.unwrap();
    // SAFETY: it is the test's, and destroyed once.
    unsafe { driver.graph_destroy(graph) }.unwrap();
}

/// Demands that a close is refused for a capture, and gives the buffer back.
#[track_caller]
fn require_refused(buffer: VirtualMemoryBuffer) -> VirtualMemoryBuffer {
    let (error, buffer) = buffer.close().unwrap_err().into_parts();
    assert_eq!(error, Error::StreamCapturing);
    buffer.unwrap()
}

#[test]
fn a_capture_that_begins_before_the_record_is_told_and_the_buffer_closes_once_it_has_ended() {
    for fenced_before in [false, true] {
        for bench in Bench::presets() {
            let stream = StreamRef::create(&bench.device()).unwrap();
            let buffer = unattended(&bench);
            if fenced_before {
                buffer.fence(&stream).unwrap();
            }
            let held = Held::queue(stream.as_raw(), &buffer);
            capture_before_next(&bench, Call::cuEventRecord, &stream);
            assert_eq!(buffer.fence(&stream), Err(Error::StreamCapturing));
            assert!(bench.meanwhile.is_over());
            assert_eq!(bench.simulator.live().events, 0, "the event is of the capture, and of no use");
            // As long as it goes on, so it is.
            assert_eq!(buffer.fence(&stream), Err(Error::StreamCapturing));
            let buffer = require_refused(require_refused(buffer));
            assert_eq!(bench.simulator.live().mappings, 1);
            end_capture(&bench.driver, &stream);
            let held = held.let_go_soon();
            buffer.close().unwrap();
            held.join().unwrap();
            drop(stream);
            bench.assert_clean();
        }
    }
}

/// The event may be captured, or not: the whole stream is waited for, and that finds out.
#[test]
fn where_the_second_question_fails_the_whole_stream_is_waited_for() {
    for captures in [false, true] {
        let bench = Bench::small();
        let stream = StreamRef::create(&bench.device()).unwrap();
        let buffer = unattended(&bench);
        let held = Held::queue(stream.as_raw(), &buffer);
        if captures {
            capture_before_next(&bench, Call::cuEventRecord, &stream);
        }
        bench.faults.fail(Call::cuStreamIsCapturing, 2, CUresult::UNKNOWN, When::Before);
        let error = buffer.fence(&stream).unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(Call::cuStreamIsCapturing), Some(CUresult::UNKNOWN)));
        assert_eq!(bench.simulator.live().events, 0);
        let buffer = if captures {
            let buffer = require_refused(buffer);
            end_capture(&bench.driver, &stream);
            buffer
        } else {
            buffer
        };
        let held = held.let_go_soon();
        buffer.close().unwrap();
        held.join().unwrap();
        drop(stream);
        bench.assert_clean();
    }
}

/// A dropped buffer can't be given back: it goes once the capture has ended, which lives.
#[test]
fn a_buffer_that_is_dropped_during_such_a_capture_goes_after_it() {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let buffer = unattended(&bench);
    capture_before_next(&bench, Call::cuEventRecord, &stream);
    assert_eq!(buffer.fence(&stream), Err(Error::StreamCapturing));
    let resource = buffer.resource().clone();
    drop(buffer);
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(resource.drain(soon), Err(Error::StillPending { buffers: 1 }));
    assert_eq!((resource.pending(), bench.simulator.live().mappings), (1, 1));
    end_capture(&bench.driver, &stream);
    drop((stream, resource));
    bench.assert_clean_soon();
}

/// The event is then the capture's, and tells nothing for ever: another is recorded.
#[test]
fn a_capture_that_begins_before_the_record_and_ends_before_it_is_looked_at_delays_nothing() {
    for bench in Bench::presets() {
        let stream = StreamRef::create(&bench.device()).unwrap();
        let buffer = unattended(&bench);
        buffer.set_release(Release::Stream(stream.clone())).unwrap();
        let resource = buffer.resource().clone();
        let (captured, driver) = (stream.clone(), bench.driver.clone());
        let (meanwhile, simulator) = (bench.meanwhile.clone(), bench.simulator.clone());
        // The question after the record is the second.
        bench.meanwhile.before_next(Call::cuEventRecord, move || {
            // SAFETY: the stream is alive, and the capture ends below.
            unsafe { driver.stream_begin_capture(captured.as_raw(), CUstreamCaptureMode::RELAXED) }.unwrap();
            meanwhile.before_next(Call::cuStreamIsCapturing, move || {
                end_capture(&driver, &captured);
                simulator.clear_calls();
            });
        });
        buffer.close_deferred();
        resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
        assert!(bench.meanwhile.is_over());
        assert_eq!(bench.count(Call::cuEventRecord), 1, "another record");
        drop((stream, resource));
        bench.assert_clean_soon();
    }
}

/// The fence is used up then, and asked no more.
#[test]
fn what_failed_before_a_deadline_passed_is_told_when_the_buffer_goes() {
    let ends: [fn(VirtualMemoryBuffer) -> Result<(), CloseError>; 2] =
        [VirtualMemoryBuffer::close, |buffer| buffer.close_within(Instant::now() + Duration::from_secs(20))];
    for end in ends {
        let bench = Bench::small();
        let [release, fenced] = [(); 2].map(|()| StreamRef::create(&bench.device()).unwrap());
        let buffer = unattended(&bench);
        buffer.set_release(Release::Stream(release.clone())).unwrap();
        let held = Held::queue(release.as_raw(), &buffer);
        buffer.fence(&fenced).unwrap();
        // The first question is of the release stream.
        bench.faults.fail(Call::cuEventQuery, 2, CUresult::LAUNCH_FAILED, When::Before);
        let (error, buffer) = buffer.close_within(Instant::now()).unwrap_err().into_parts();
        assert_eq!((error, bench.faults.fired()), (Error::DeadlinePassed, 1));
        drop(held);
        let (error, back) = end(buffer.unwrap()).unwrap_err().into_parts();
        assert_eq!((error.code(), back.is_none()), (Some(CUresult::LAUNCH_FAILED), true));
        drop((release, fenced));
        bench.assert_clean();
    }
}

/// Only what can't be found out again and again is given up.
#[test]
fn questions_that_fail_now_and_then_delay_nothing_and_strand_nothing() {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let buffer = unattended(&bench);
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let resource = buffer.resource().clone();
    let held = Held::queue(stream.as_raw(), &buffer);
    let asked = AtomicUsize::new(0);
    let every_other = move |_: &[u64]| asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    bench.faults.fail_when(Call::cuEventQuery, every_other, CUresult::UNKNOWN, When::Before);
    buffer.close_deferred();
    bench.wait_until(|bench| bench.faults.fired() > 20);
    assert_eq!(resource.pending(), 1);
    drop(held);
    resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
    bench.faults.clear();
    drop((stream, resource));
    bench.assert_clean_soon();
}

/// So long whoever gave the stream has to keep it, and its context.
#[test]
fn what_is_given_up_is_pending_until_its_events_are_gone() {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let buffer = unattended(&bench);
    buffer.fence(&stream).unwrap();
    let resource = buffer.resource().clone();
    let (tell, told) = channel();
    let asked = resource.clone();
    bench.meanwhile.before_next(Call::cuEventDestroy, move || tell.send(asked.pending()).unwrap());
    bench.faults.fail_when(Call::cuCtxPushCurrent, |_| true, CUresult::UNKNOWN, When::Before);
    buffer.close_deferred();
    resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
    bench.faults.clear();
    assert_eq!(told.try_recv(), Ok(1));
    assert_eq!((resource.statistics().stranded, bench.simulator.live().events), (1, 0));
}

/// The event went with the context, and the work too.
#[test]
fn a_fence_whose_context_was_reset_is_not_asked_and_not_destroyed() {
    for end in [0, 1, 2, 3] {
        let bench = Bench::small();
        let stream = StreamRef::create(&bench.device()).unwrap();
        let buffer = unattended(&bench);
        buffer.fence(&stream).unwrap();
        let resource = buffer.resource().clone();
        // SAFETY: a number alone; nothing runs.
        assert_eq!(unsafe { bench.driver.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }, CUresult::SUCCESS);
        let told = match end {
            0 => buffer.close(),
            1 => buffer.close_within(Instant::now()),
            2 => {
                drop(buffer);
                Ok(())
            }
            _ => {
                buffer.close_deferred();
                Ok(())
            }
        };
        let code = told.map_err(|error| (error.error().code(), error.into_buffer().is_none()));
        assert_eq!(code, if end < 2 { Err((Some(CUresult::CONTEXT_IS_DESTROYED), true)) } else { Ok(()) });
        resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
        assert_eq!((bench.simulator.live().mappings, bench.simulator.violations()), (0, vec![]));
        drop(stream);
        assert_eq!(bench.simulator.violations(), [], "the stream went with its context, too");
    }
}

#[test]
fn fences_on_ever_new_streams_whose_work_is_over_are_few() {
    const MANY: usize = 300;
    let bench = Bench::small();
    let buffer = unattended(&bench);
    let mut most = (0, 0);
    for _ in 0..MANY {
        let stream = StreamRef::create(&bench.device()).unwrap();
        buffer.fence(&stream).unwrap();
        stream.synchronize().unwrap();
        drop(stream);
        let live = bench.simulator.live();
        most = (live.events.max(most.0), live.streams.max(most.1));
    }
    assert!(most.0 <= 16 && most.1 <= 16, "{most:?} events and streams at once");
    let queries = bench.count(Call::cuEventQuery);
    assert!(queries <= 3 * MANY, "{queries} queries for {MANY} fences");
    buffer.close().unwrap();
    bench.assert_clean();
}

#[test]
fn fences_whose_work_goes_on_are_kept_whatever_their_number() {
    const BUSY: usize = 24;
    let bench = Bench::small();
    let buffer = unattended(&bench);
    let mut held = Vec::new();
    for round in 0..10 * BUSY {
        let stream = StreamRef::create(&bench.device()).unwrap();
        let is_busy = round % 10 == 0;
        if is_busy {
            held.push(Held::queue(stream.as_raw(), &buffer));
        }
        buffer.fence(&stream).unwrap();
        if !is_busy {
            stream.synchronize().unwrap();
        }
        let (busy, live) = (held.len(), bench.simulator.live());
        assert!(live.events >= busy && live.streams >= busy, "{live:?}");
        assert!(live.events <= 16.max(3 * busy), "{live:?} for {busy} that are busy");
    }
    assert_eq!(held.len(), BUSY);
    // The last to be let go of decides, wherever it is in the list.
    let last = held.remove(BUSY / 2);
    drop(held);
    let last = last.let_go_soon();
    buffer.close().unwrap();
    last.join().unwrap();
    bench.assert_clean();
}

/// Whether the work is over is not known then.
#[test]
fn a_fence_that_can_not_be_asked_is_kept() {
    let bench = Bench::small();
    let buffer = unattended(&bench);
    let busy = StreamRef::create(&bench.device()).unwrap();
    let held = Held::queue(busy.as_raw(), &buffer);
    buffer.fence(&busy).unwrap();
    drop(busy);
    bench.faults.fail_when(Call::cuEventQuery, |_| true, CUresult::UNKNOWN, When::Before);
    for _ in 0..40 {
        let stream = StreamRef::create(&bench.device()).unwrap();
        buffer.fence(&stream).unwrap();
    }
    assert_eq!(bench.simulator.live().events, 41);
    bench.faults.clear();
    let held = held.let_go_soon();
    buffer.close().unwrap();
    held.join().unwrap();
    bench.assert_clean();
}

/// Nobody's context need be current, then or later.
#[test]
fn a_fence_by_token_keeps_the_primary_context() {
    for name in [CUstream::NULL, CUstream::LEGACY, CUstream::PER_THREAD] {
        for (is_current, drops) in [(true, false), (true, true), (false, false), (false, true)] {
            let bench = Bench::small();
            let buffer = unattended(&bench);
            let stream = StreamRef::create(&bench.device()).unwrap();
            let token = token(&bench, name);
            let held = in_primary(&bench.device(), |_| {
                let held = Held::queue(CUstream::LEGACY, &buffer);
                if is_current {
                    buffer.fence(&token).unwrap();
                }
                held
            });
            assert_eq!(bench.driver.ctx_get_current().unwrap(), CUcontext::NULL);
            if !is_current {
                buffer.fence(&token).unwrap();
            }
            drop((stream, token));
            assert_eq!((bench.simulator.live().streams, bench.simulator.live().contexts), (0, 1));
            let held = held.let_go_soon();
            if drops {
                drop(buffer);
            } else {
                buffer.close().unwrap();
            }
            held.join().unwrap();
            bench.assert_clean();
        }
    }
}

/// A copy whose wait failed leaves the same kind of fence.
#[test]
fn a_transfer_by_token_keeps_the_primary_context() {
    let bench = Bench::small();
    let buffer = unattended(&bench);
    let stream = StreamRef::create(&bench.device()).unwrap();
    let held = in_primary(&bench.device(), |_| Held::queue(CUstream::LEGACY, &buffer));
    // A transfer waits twice before it gives up.
    bench.faults.fail(Call::cuStreamSynchronize, 1, CUresult::UNKNOWN, When::Before);
    bench.faults.fail(Call::cuStreamSynchronize, 2, CUresult::UNKNOWN, When::Before);
    let error = buffer.fill_on(&token(&bench, CUstream::NULL), 0, G, 1).unwrap_err();
    assert_eq!(error.call(), Some(Call::cuStreamSynchronize));
    drop(stream);
    assert_eq!(bench.simulator.live().contexts, 1);
    let held = held.let_go_soon();
    buffer.close().unwrap();
    held.join().unwrap();
    bench.assert_clean();
}

/// A capture that begins between the fill and the wait is waited out; whether the fill was captured is then not known,
/// so that it may be told as failed.
#[test]
fn a_transfer_during_a_capture_that_begins_beside_it_ends_after_it() {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let buffer = unattended(&bench);
    let held = Held::queue(stream.as_raw(), &buffer);
    capture_before_next(&bench, Call::cuStreamSynchronize, &stream);
    let ended = std::thread::spawn({
        let (driver, stream, meanwhile) = (bench.driver.clone(), stream.clone(), bench.meanwhile.clone());
        move || {
            while !meanwhile.is_over() {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(30));
            end_capture_lost(&driver, &stream);
        }
    });
    let held = held.let_go_soon();
    let filled = buffer.fill_on(&stream, 0, G, 3);
    assert!(matches!(filled, Err(Error::StreamCapturing)), "{filled:?}");
    assert!(is_done(&stream));
    assert_eq!(bench.bytes_of(&buffer), [3; G]);
    ended.join().unwrap();
    held.join().unwrap();
    drop((stream, buffer));
    bench.assert_clean();
}

/// Ends a capture that a wait for its stream may have killed.
fn end_capture_lost(driver: &Driver, stream: &StreamRef) {
    // SAFETY: the stream is alive.
    match unsafe { driver.stream_end_capture(stream.as_raw()) } {
        // SAFETY: it is the test's, and destroyed once.
        Ok(graph) => unsafe { driver.graph_destroy(graph) }.unwrap(),
        Err(error) => assert_eq!(error.code(), Some(CUresult::STREAM_CAPTURE_INVALIDATED)),
    }
}
