//! What a buffer waits for before its memory goes, where a call on the way there fails: no unmap runs under work that
//! is queued, whichever call it is.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cuvmm_driver::sys::{CUstream, CUstream_flags};
use cuvmm_driver::{CUresult, Call, StrandedKind};
use cuvmm_resource::{Error, Options, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_sim::{Hints, Machine, When};
use support::work::{Foreign, Held, begin_capture, end_capture, is_done, token};
use support::{Bench, G};

/// Codes that do not say that the work is over.
const CODES: [CUresult; 2] = [CUresult::OUT_OF_MEMORY, CUresult::UNKNOWN];

/// How many cases are tried at a time.
const SIDE_BY_SIDE: usize = 6;

/// What a buffer waits for.
#[derive(Clone, Copy, Debug)]
enum Behind {
    Default,
    Stream,
    Fence,
    Everything,
}

/// How a buffer lets go of its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Close,
    Drop,
    Move,
}

/// A buffer with work queued on it, held up, on each stream that it is to wait for.
struct Busy {
    bench: Bench,
    buffer: Option<VirtualMemoryBuffer>,
    held: Vec<Held>,
    /// What the work is queued on.
    streams: Vec<StreamRef>,
}

impl Busy {
    fn new(behind: Behind) -> Self {
        // Where no hint is granted, a buffer that grows moves.
        let bench = Bench::new(Machine::small().hints(Hints::Refused(CUresult::INVALID_VALUE)));
        let buffer = bench.resource(Options::new().release(Release::Caller)).allocate(G).unwrap();
        let stream = || StreamRef::create(&bench.device()).unwrap();
        let blocking = || StreamRef::from_owner(Foreign::new(&bench, CUstream_flags::DEFAULT)).unwrap();
        let streams = match behind {
            Behind::Default => vec![blocking()],
            Behind::Stream | Behind::Fence => vec![stream()],
            Behind::Everything => vec![stream(), stream(), stream()],
        };
        let held = streams.iter().map(|stream| Held::queue(stream.as_raw(), &buffer)).collect();
        let fences = match behind {
            Behind::Default => {
                buffer.set_release(Release::DefaultStream).unwrap();
                &[]
            }
            Behind::Fence => &streams[..],
            Behind::Stream | Behind::Everything => {
                buffer.set_release(Release::Stream(streams[0].clone())).unwrap();
                &streams[1..]
            }
        };
        fences.iter().for_each(|stream| buffer.fence(stream).unwrap());
        bench.simulator.clear_calls();
        Self { bench, buffer: Some(buffer), held, streams }
    }

    /// Ends the buffer on a thread of its own, whose context and capture mode nobody else sees, while the work goes
    /// on for a while. Gives what comes back, open.
    fn end(&mut self, end: End) -> Option<VirtualMemoryBuffer> {
        let buffer = self.buffer.take().unwrap();
        let ended = std::thread::spawn(move || match end {
            End::Close => buffer.close().err().and_then(|error| error.into_buffer()),
            End::Drop => None,
            End::Move => Some(buffer.grow_into(40 << 20).unwrap_or_else(|error| error.into_buffer())),
        });
        if end == End::Drop {
            // It asks as long as the work takes: that is until a stream was asked about twice, or a call has failed.
            let streams = self.streams.len();
            let is_asked = |bench: &Bench| bench.count(Call::cuEventQuery) > streams;
            self.bench.wait_until(|bench| is_asked(bench) || bench.faults.fired() > 0);
        }
        let held: Vec<_> = self.held.drain(..).map(Held::let_go_soon).collect();
        let ended = ended.join().unwrap();
        // None of the work may be under an unmap; it is over soon in any case.
        held.into_iter().for_each(|held| held.join().unwrap());
        ended
    }

    /// The calls of ending it that are none of the memory's, each with which one of its name it is.
    fn gate(behind: Behind, end: End) -> Vec<(Call, usize)> {
        let mut busy = Self::new(behind);
        let came_back = busy.end(end);
        assert_eq!(busy.bench.simulator.violations(), []);
        let mut counts = BTreeMap::new();
        let calls = busy.bench.simulator.calls().into_iter().filter(|call| !call.to_string().starts_with("cuMem"));
        let gate = calls.map(|call| (call, *counts.entry(call).and_modify(|nth| *nth += 1).or_insert(1))).collect();
        assert_eq!(came_back.is_some(), end == End::Move, "{end:?} succeeds where nothing fails");
        gate
    }
}

/// A call to fail, which one of its name it is, and what it answers.
type Failing = (Behind, Call, usize, CUresult);

fn cases(end: End) -> Vec<Failing> {
    let mut cases = Vec::new();
    for behind in [Behind::Default, Behind::Stream, Behind::Fence, Behind::Everything] {
        let mut gate = Busy::gate(behind, end);
        assert!(gate.len() >= 4, "{gate:?}");
        if end == End::Drop {
            // It asks as often as the work takes: the first questions, and what comes when it is over, are there each time.
            let streams = Busy::new(behind).streams.len();
            let is_later = |step: &(Call, usize)| *step == (Call::cuEventQuery, streams + 1);
            let early = gate.iter().position(is_later).unwrap_or(gate.len());
            let late = gate.split_off(early).into_iter();
            gate.extend(
                late.filter(|(call, _)| [Call::cuEventDestroy, Call::cuDevicePrimaryCtxRelease].contains(call)),
            );
        }
        cases.extend(gate.iter().flat_map(|(call, nth)| CODES.map(|code| (behind, *call, *nth, code))));
    }
    cases
}

/// Side by side, each on a simulator of its own: all they do is wait.
fn fail_each_call(end: End) {
    let cases = Mutex::new(cases(end).into_iter());
    let next = || cases.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..SIDE_BY_SIDE {
            scope.spawn(|| std::iter::from_fn(next).for_each(|case| fail_call(end, case)));
        }
    });
}

fn fail_call(end: End, (behind, call, nth, code): Failing) {
    let what = format!("{behind:?}, {end:?}: {call} #{nth} fails with {code:?}");
    let mut busy = Busy::new(behind);
    busy.bench.faults.fail(call, nth, code, When::Before);
    let came_back = busy.end(end);
    assert_eq!(busy.bench.faults.fired(), 1, "{what}");
    assert_eq!(busy.bench.simulator.violations(), [], "{what}");
    let stranded = busy.bench.driver.stranded();
    if let Some(buffer) = came_back {
        assert_eq!(stranded.count(StrandedKind::Buffer), 0, "{what}");
        buffer.close().unwrap();
    }
    let Busy { bench, streams, .. } = busy;
    drop(streams);
    // Where nobody could be given it, it goes a little later.
    bench.wait_until(|bench| bench.simulator.live().mappings == 0);
    assert_eq!(bench.simulator.violations(), [], "{what}");
    let stranded = bench.driver.stranded();
    assert_eq!(stranded.count(StrandedKind::Buffer), 0, "{what}");
    // What is left is counted.
    bench.wait_until(|bench| bench.simulator.live().is_empty() || !bench.driver.stranded().is_empty());
}

#[test]
fn a_close_whose_gate_fails_unmaps_nothing_under_work() {
    fail_each_call(End::Close);
}

#[test]
fn a_drop_whose_gate_fails_unmaps_nothing_under_work() {
    fail_each_call(End::Drop);
}

#[test]
fn a_move_whose_gate_fails_unmaps_nothing_under_work() {
    fail_each_call(End::Move);
}

type Transfer = fn(&VirtualMemoryBuffer, &StreamRef) -> Result<(), Error>;

const TRANSFERS: [(Call, Transfer); 3] = [
    (Call::cuMemsetD8Async, |buffer, stream| buffer.fill_on(stream, 0, G, 1)),
    (Call::cuMemcpyHtoDAsync, |buffer, stream| buffer.copy_from_host_on(stream, 0, &[1; G])),
    (Call::cuMemcpyDtoHAsync, |buffer, stream| buffer.copy_to_host_on(stream, 0, &mut [0; G])),
];

/// A resource that waits for nothing when its buffers close, and a buffer of it.
fn unattended(bench: &Bench) -> VirtualMemoryBuffer {
    bench.resource(Options::new().release(Release::Caller)).allocate(G).unwrap()
}

#[test]
fn work_that_was_queued_by_a_call_that_failed_is_waited_for() {
    for (call, transfer) in TRANSFERS {
        for code in CODES {
            let bench = Bench::small();
            let stream = StreamRef::create(&bench.device()).unwrap();
            let (buffer, other) = (unattended(&bench), unattended(&bench));
            let held = Held::queue(stream.as_raw(), &other).let_go_soon();
            bench.faults.fail(call, 1, code, When::After);
            let error = transfer(&buffer, &stream).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(call), Some(code)));
            assert!(is_done(&stream), "{call}: its work may be going on");
            buffer.close().unwrap();
            held.join().unwrap();
            drop((stream, other));
            bench.assert_clean();
        }
    }
}

/// A call that failed before it queued anything is told, too, and leaves nothing to wait for.
#[test]
fn work_that_was_not_queued_is_no_reason_to_wait_later() {
    for (call, transfer) in TRANSFERS {
        let bench = Bench::small();
        let stream = StreamRef::create(&bench.device()).unwrap();
        let (buffer, other) = (unattended(&bench), unattended(&bench));
        bench.faults.fail(call, 1, CUresult::UNKNOWN, When::Before);
        assert_eq!(transfer(&buffer, &stream).unwrap_err().call(), Some(call));
        let held = Held::queue(stream.as_raw(), &other);
        buffer.close().unwrap();
        assert!(!is_done(&stream), "nothing of this buffer was queued");
        held.let_go_soon().join().unwrap();
        stream.synchronize().unwrap();
        drop((stream, other));
        bench.assert_clean();
    }
}

#[test]
fn after_a_transfer_whose_waits_failed_the_buffer_waits_for_the_stream() {
    for (_, transfer) in &TRANSFERS[..2] {
        for (code, drops) in CODES.into_iter().flat_map(|code| [(code, false), (code, true)]) {
            let bench = Bench::small();
            let stream = StreamRef::create(&bench.device()).unwrap();
            let (buffer, other) = (unattended(&bench), unattended(&bench));
            let held = Held::queue(stream.as_raw(), &other);
            // A transfer waits twice before it gives up.
            bench.faults.fail(Call::cuStreamSynchronize, 1, code, When::Before);
            bench.faults.fail(Call::cuStreamSynchronize, 2, code, When::Before);
            let error = transfer(&buffer, &stream).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuStreamSynchronize), Some(code)));
            assert!(!is_done(&stream), "its work goes on");
            let held = held.let_go_soon();
            // The buffer keeps the stream.
            drop(stream);
            if drops {
                drop(buffer);
            } else {
                buffer.close().unwrap();
            }
            held.join().unwrap();
            other.close().unwrap();
            bench.assert_clean();
        }
    }
}

#[test]
fn after_a_fill_whose_waits_failed_the_buffer_waits_for_the_resources_own_stream() {
    let bench = Bench::small();
    let buffer = unattended(&bench);
    // The fourth argument of the first fill tells the stream.
    let own = Arc::new(AtomicUsize::new(0));
    let seen = own.clone();
    let look = move |arguments: &[u64]| {
        seen.store(arguments[3] as usize, Ordering::Relaxed);
        false
    };
    bench.faults.fail_when(Call::cuMemsetD8Async, look, CUresult::UNKNOWN, When::Before);
    buffer.fill(0, G, 1).unwrap();
    bench.faults.clear();
    let own = CUstream(std::ptr::without_provenance_mut(own.load(Ordering::Relaxed)));
    assert!(!own.is_default_token());

    let other = buffer.resource().allocate(G).unwrap();
    let held = Held::queue(own, &other);
    // A transfer waits twice before it gives up.
    bench.faults.fail(Call::cuStreamSynchronize, 1, CUresult::UNKNOWN, When::Before);
    bench.faults.fail(Call::cuStreamSynchronize, 2, CUresult::UNKNOWN, When::Before);
    assert_eq!(buffer.fill(0, G, 2).unwrap_err().call(), Some(Call::cuStreamSynchronize));
    let held = held.let_go_soon();
    buffer.close().unwrap();
    held.join().unwrap();
    drop(other);
    bench.assert_clean();
}

#[test]
fn closing_on_a_token_waits_for_the_default_stream() {
    for name in [CUstream::NULL, CUstream::LEGACY, CUstream::PER_THREAD] {
        let bench = Bench::small();
        let (blocking, own) =
            (Foreign::new(&bench, CUstream_flags::DEFAULT), StreamRef::create(&bench.device()).unwrap());
        for release in [Release::Caller, Release::Stream(own.clone())] {
            let (buffer, other) = (unattended(&bench), unattended(&bench));
            buffer.set_release(release).unwrap();
            let on_own = Held::queue(own.as_raw(), &other);
            let on_blocking = Held::queue(blocking.stream, &buffer).let_go_soon();
            buffer.close_on(&token(&bench, name)).unwrap();
            on_blocking.join().unwrap();
            assert!(!is_done(&own), "it is waited for instead of the release stream");
            on_own.let_go_soon().join().unwrap();
            own.synchronize().unwrap();
        }
        drop((blocking, own));
        bench.assert_clean();
    }
}

/// A driver that is asked for what went with its context can crash, also when the thread's mode was not had before.
#[test]
fn nothing_is_asked_of_a_stream_whose_context_is_gone() {
    for code in [CUresult::CONTEXT_IS_DESTROYED, CUresult::INVALID_CONTEXT] {
        for is_relaxed in [true, false] {
            let bench = Bench::small();
            let stream = StreamRef::create(&bench.device()).unwrap();
            let options = Options::new().release(Release::Stream(stream.clone()));
            let buffer = bench.resource(options).allocate(G).unwrap();
            buffer.fence(&StreamRef::create(&bench.device()).unwrap()).unwrap();
            let any = |_: &[u64]| true;
            bench.faults.fail_when(Call::cuCtxPushCurrent, any, code, When::Before);
            if !is_relaxed {
                bench.faults.fail_when(Call::cuThreadExchangeStreamCaptureMode, any, CUresult::UNKNOWN, When::Before);
            }
            bench.simulator.clear_calls();
            let (error, buffer) = buffer.close().unwrap_err().into_parts();
            let expected = if is_relaxed { code } else { CUresult::UNKNOWN };
            assert_eq!((error.code(), buffer.is_none()), (Some(expected), true), "{error}");
            for call in [Call::cuStreamIsCapturing, Call::cuStreamSynchronize, Call::cuEventSynchronize] {
                assert_eq!(bench.count(call), 0, "{call}");
            }
            assert_eq!(bench.simulator.live().mappings, 0);
            bench.faults.clear();
        }
    }
}

/// Work that can be waited for is, whatever the question about captures was answered: on one stream, and beside others.
#[test]
fn an_answer_that_there_is_no_context_to_ask_about_captures_is_no_wait() {
    for code in [CUresult::INVALID_CONTEXT, CUresult::INVALID_HANDLE, CUresult::ILLEGAL_ADDRESS] {
        for fences in [0, 1] {
            let bench = Bench::small();
            let stream = StreamRef::create(&bench.device()).unwrap();
            let release = Options::new().release(Release::Stream(stream.clone()));
            let buffer = bench.resource(release).allocate(G).unwrap();
            (0..fences).for_each(|_| buffer.fence(&StreamRef::create(&bench.device()).unwrap()).unwrap());
            let held = Held::queue(stream.as_raw(), &buffer).let_go_soon();
            bench.faults.fail(Call::cuStreamIsCapturing, 1, code, When::Before);
            let (error, buffer) = buffer.close().unwrap_err().into_parts();
            assert_eq!((error.call(), error.code()), (Some(Call::cuStreamIsCapturing), Some(code)));
            assert!(buffer.is_none() && is_done(&stream), "{code:?}, {fences} fences");
            held.join().unwrap();
            drop(stream);
            bench.assert_clean();
        }
    }
}

/// The wait would be the end of the capture.
#[test]
fn a_close_that_is_not_told_whether_the_stream_captures_gives_the_buffer_back() {
    for bench in Bench::presets() {
        let foreign = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
        let release = Release::Stream(StreamRef::from_owner(foreign.clone()).unwrap());
        let resource = bench.resource(Options::new().release(release));
        let buffer = resource.allocate(G).unwrap();
        begin_capture(&foreign);
        bench.faults.fail(Call::cuStreamIsCapturing, 1, CUresult::UNKNOWN, When::Before);
        let (error, buffer) = buffer.close().unwrap_err().into_parts();
        assert_eq!((error.call(), error.code()), (Some(Call::cuStreamIsCapturing), Some(CUresult::UNKNOWN)));
        assert!(end_capture(&foreign), "the capture ends well");
        buffer.unwrap().close().unwrap();
        drop((foreign, resource));
        bench.assert_clean();
    }
}

/// What a close comes to where every such call fails: the error, whether the buffer came back, whether its memory is mapped,
/// and whether the stream was waited for.
fn settled(call: Call, code: CUresult, is_default: bool, others: usize) -> (Error, bool, bool, bool) {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let release = if is_default { Release::DefaultStream } else { Release::Stream(stream.clone()) };
    let buffer = bench.resource(Options::new().release(release)).allocate(G).unwrap();
    for _ in 0..others {
        buffer.fence(&StreamRef::create(&bench.device()).unwrap()).unwrap();
    }
    bench.simulator.clear_calls();
    bench.faults.fail_when(call, |_: &[u64]| true, code, When::Before);
    let (error, buffer) = buffer.close().unwrap_err().into_parts();
    let is_mapped = bench.simulator.live().mappings > 0;
    let is_waited_for = bench.count(Call::cuStreamSynchronize) > 0;
    bench.faults.clear();
    (error, buffer.is_some(), is_mapped, is_waited_for)
}

#[test]
fn one_stream_alone_is_settled_as_one_of_several() {
    let codes = [
        CUresult::OUT_OF_MEMORY,
        CUresult::UNKNOWN,
        CUresult::STREAM_CAPTURE_IMPLICIT,
        CUresult(700),
        CUresult::INVALID_HANDLE,
        CUresult::INVALID_CONTEXT,
        CUresult::CONTEXT_IS_DESTROYED,
        CUresult::DEINITIALIZED,
    ];
    for call in [
        Call::cuCtxGetCurrent,
        Call::cuThreadExchangeStreamCaptureMode,
        Call::cuCtxPushCurrent,
        Call::cuStreamIsCapturing,
        Call::cuStreamSynchronize,
        Call::cuCtxPopCurrent,
    ] {
        for (code, is_default) in codes.into_iter().flat_map(|code| [(code, false), (code, true)]) {
            let [alone, among] = [0, 1].map(|others| settled(call, code, is_default, others));
            assert_eq!(alone, among, "{call}, {code:?}, default stream: {is_default}");
        }
    }
}
