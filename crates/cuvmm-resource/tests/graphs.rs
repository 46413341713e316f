//! Graphs that own memory: what is refused, and what becomes of it where a call fails.
//!
//! # Safety
//! Streams, graphs and executables are a test's own, and alive while it uses them, on one thread at a time.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::{CUcontext, CUgraph, CUstream, CUstream_flags, CUstreamCaptureMode};
use cuvmm_driver::{CUresult, Call, CudaVersion, StrandedKind};
use cuvmm_resource::{Error, Options, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, When};
use support::work::{Foreign, Held, begin_capture, end_capture, in_host_function, token};
use support::{Bench, G};

/// A buffer that waits for nothing, so that no call is its own wait's.
fn buffer_of(bench: &Bench) -> VirtualMemoryBuffer {
    bench.resource(Options::new().release(Release::Caller)).allocate(G).unwrap()
}

fn graph_of(bench: &Bench) -> CUgraph {
    bench.driver.graph_create().unwrap()
}

fn retain(buffer: &VirtualMemoryBuffer, graph: CUgraph) -> Result<(), Error> {
    // SAFETY: the graph is alive, and this thread's.
    unsafe { buffer.retain_in_graph(graph) }
}

fn retain_captured(buffer: &VirtualMemoryBuffer, stream: &StreamRef) -> Result<(), Error> {
    // SAFETY: the capture ends later, on this thread.
    unsafe { buffer.retain_in_capture(stream) }
}

fn destroy(bench: &Bench, graph: CUgraph) {
    // SAFETY: it is the test's.
    unsafe { bench.driver.graph_destroy(graph) }.unwrap();
}

/// Waits until no graph has anything of the resource's any more, and nothing of it is left to the library's thread.
#[track_caller]
fn settle(resource: &VirtualMemoryResource) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while resource.statistics().in_graphs > 0 {
        assert!(Instant::now() < deadline, "a graph keeps it");
        std::thread::yield_now();
    }
    resource.drain(deadline).unwrap();
}

#[test]
fn the_memory_goes_with_the_last_of_buffer_and_graph() {
    for bench in Bench::presets() {
        let (graph, buffer) = (graph_of(&bench), buffer_of(&bench));
        let (resource, address) = (buffer.resource().clone(), buffer.address());
        retain(&buffer, graph).unwrap();
        assert_eq!((resource.statistics().in_graphs, resource.pending()), (1, 0));
        buffer.close().unwrap();
        assert_eq!((resource.statistics().in_graphs, resource.pending()), (1, 0));
        assert!(bench.simulator.peek(address, G).is_some());
        destroy(&bench, graph);
        settle(&resource);
        assert_eq!(bench.simulator.peek(address, G), None);
        drop(resource);
        bench.assert_clean();
    }
}

#[test]
fn a_graph_that_goes_first_leaves_the_buffer_as_it_was_and_makes_no_call() {
    let bench = Bench::small();
    let (graph, buffer) = (graph_of(&bench), buffer_of(&bench));
    retain(&buffer, graph).unwrap();
    bench.simulator.clear_calls();
    destroy(&bench, graph);
    settle(buffer.resource());
    assert_eq!(bench.simulator.calls(), [Call::cuGraphDestroy]);
    buffer.fill(0, G, 3).unwrap();
    assert_eq!(bench.bytes_of(&buffer), [3; G]);
    buffer.close().unwrap();
    bench.assert_clean();
}

/// A share each time, and each goes.
#[test]
fn a_graph_may_be_given_the_same_memory_twice() {
    let bench = Bench::small();
    let (graph, buffer) = (graph_of(&bench), buffer_of(&bench));
    retain(&buffer, graph).unwrap();
    let grown = buffer.grow(2 * G).unwrap();
    retain(&grown, graph).unwrap();
    retain(&buffer, graph).unwrap();
    let resource = buffer.resource().clone();
    assert_eq!(resource.statistics().in_graphs, 3);
    buffer.close().unwrap();
    grown.close().unwrap();
    assert_eq!(bench.simulator.live().mappings, 2);
    destroy(&bench, graph);
    settle(&resource);
    drop(resource);
    bench.assert_clean();
}

#[test]
fn a_graph_keeps_the_memory_but_not_the_resource() {
    let bench = Bench::small();
    let (graph, buffer) = (graph_of(&bench), buffer_of(&bench));
    // So the resource has a stream.
    buffer.fill(0, G, 1).unwrap();
    assert_eq!(bench.left()[4..], [1, 1]);
    retain(&buffer, graph).unwrap();
    drop(buffer);
    assert_eq!(bench.left(), [1, 1, 1, 0, 0, 0]);
    destroy(&bench, graph);
    let deadline = Instant::now() + Duration::from_secs(30);
    while !bench.simulator.live().is_empty() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    bench.assert_clean();
}

#[test]
fn an_empty_buffer_has_nothing_to_give() {
    let bench = Bench::small();
    let (graph, empty) = (graph_of(&bench), bench.plain().allocate_with_capacity(0, G).unwrap());
    let stream = StreamRef::create(&bench.device()).unwrap();
    bench.simulator.clear_calls();
    retain(&empty, graph).unwrap();
    retain_captured(&empty, &stream).unwrap();
    bench.assert_no_call();
    assert_eq!(empty.resource().statistics().in_graphs, 0);
    destroy(&bench, graph);
}

#[test]
fn in_a_host_function_nothing_but_where_it_is_is_asked() {
    let bench = Bench::small();
    let (graph, buffer) = (graph_of(&bench), buffer_of(&bench));
    let [runner, other] = [(); 2].map(|()| StreamRef::create(&bench.device()).unwrap());
    let (sender, receiver) = channel();
    let (address, simulator) = (graph.0.addr(), bench.simulator.clone());
    in_host_function(&runner, move || {
        simulator.clear_calls();
        let graph = CUgraph(std::ptr::without_provenance_mut(address));
        let refused = [retain(&buffer, graph), retain_captured(&buffer, &other)];
        sender.send((buffer, other, refused, simulator.calls())).unwrap();
    });
    let (buffer, _other, refused, calls) = receiver.recv().unwrap();
    assert_eq!(refused, [Err(Error::HostCallback), Err(Error::HostCallback)]);
    assert_eq!(calls, [Call::cuCtxGetCurrent; 2]);
    bench.simulator.clear_violations();
    destroy(&bench, graph);
    buffer.close().unwrap();
}

#[test]
fn a_stream_that_captures_nothing_is_refused() {
    for bench in Bench::presets() {
        let buffer = buffer_of(&bench);
        let [foreign, blocking] =
            [CUstream_flags::NON_BLOCKING, CUstream_flags::DEFAULT].map(|flags| Foreign::new(&bench, flags));
        let [stream, other] = [&foreign, &blocking].map(|of| StreamRef::from_owner(of.clone()).unwrap());
        assert_eq!(retain_captured(&buffer, &stream), Err(Error::NotCapturing));
        // A capture that waiting for its stream has killed.
        begin_capture(&foreign);
        // SAFETY: the stream is alive.
        let waited = unsafe { bench.driver.stream_synchronize(foreign.stream) };
        assert_eq!(waited.unwrap_err().code(), Some(CUresult::STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(retain_captured(&buffer, &stream), Err(Error::NotCapturing));
        assert!(!end_capture(&foreign));
        // The legacy default stream takes part in this one, and has no graph.
        begin_capture(&blocking);
        let current = bench.device().primary_ctx_retain().unwrap();
        // SAFETY: it was retained just now.
        unsafe { bench.driver.ctx_push_current(current) }.unwrap();
        assert_eq!(retain_captured(&buffer, &token(&bench, CUstream::LEGACY)), Err(Error::NotCapturing));
        // SAFETY: as above, and both are undone once.
        unsafe { bench.driver.ctx_pop_current() }.unwrap();
        // SAFETY: as above.
        unsafe { bench.device().primary_ctx_release() }.unwrap();
        assert_eq!(retain_captured(&buffer, &other), Ok(()));
        assert!(end_capture(&blocking));
        settle(buffer.resource());
        buffer.close().unwrap();
        drop((stream, other, foreign, blocking));
        bench.assert_clean();
    }
}

#[test]
fn a_stream_of_another_driver_is_refused() {
    let [bench, other] = [Bench::small(), Bench::small()];
    let buffer = buffer_of(&bench);
    let foreign = Foreign::new(&other, CUstream_flags::NON_BLOCKING);
    begin_capture(&foreign);
    let refused = retain_captured(&buffer, &StreamRef::from_owner(foreign.clone()).unwrap());
    assert_eq!(refused, Err(Error::Driver(cuvmm_driver::Error::DifferentDrivers)));
    assert!(end_capture(&foreign));
}

#[test]
fn drivers_without_user_objects_say_so() {
    let bench = Bench::new(Machine::small().driver_version(11020));
    let (graph, buffer) = (graph_of(&bench), buffer_of(&bench));
    let lacks = |symbol| Err(Error::Driver(cuvmm_driver::Error::Unsupported { symbol, since: CudaVersion(11030) }));
    assert_eq!(retain(&buffer, graph), lacks(Call::cuUserObjectCreate));
    let foreign = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
    begin_capture(&foreign);
    let stream = StreamRef::from_owner(foreign.clone()).unwrap();
    assert_eq!(retain_captured(&buffer, &stream), lacks(Call::cuStreamGetCaptureInfo));
    drop(stream);
    assert!(end_capture(&foreign));
    assert_eq!(buffer.resource().statistics().in_graphs, 0);
    buffer.close().unwrap();
    destroy(&bench, graph);
    drop(foreign);
    bench.assert_clean();
}

#[test]
fn the_capture_the_context_and_the_mode_are_as_before() {
    let bench = Bench::small();
    let buffer = buffer_of(&bench);
    let foreign = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
    let stream = StreamRef::from_owner(foreign.clone()).unwrap();
    begin_capture(&foreign);
    for mode in [CUstreamCaptureMode::GLOBAL, CUstreamCaptureMode::THREAD_LOCAL, CUstreamCaptureMode::RELAXED] {
        let before = bench.driver.thread_exchange_stream_capture_mode(mode).unwrap();
        retain_captured(&buffer, &stream).unwrap();
        assert_eq!(bench.driver.ctx_get_current().unwrap(), CUcontext::NULL);
        assert_eq!(bench.driver.thread_exchange_stream_capture_mode(before).unwrap(), mode);
    }
    assert!(end_capture(&foreign));
    settle(buffer.resource());
}

/// What a graph left has nothing to wait for. What a buffer of the same memory waits for is not forgotten over it, also where
/// that can't be found out at once.
#[test]
fn what_a_buffer_waits_for_is_waited_for_beside_what_a_graph_left() {
    let bench = Bench::small();
    let foreign = Foreign::new(&bench, CUstream_flags::DEFAULT);
    let (graph, resource) = (graph_of(&bench), bench.plain());
    let [first, buffer] = [(); 2].map(|()| resource.allocate(G).unwrap());
    retain(&buffer, graph).unwrap();
    let held = Held::queue(foreign.stream, &buffer);
    // The library's thread is kept busy until it has been left both.
    let (reached, (go, gone)) = (channel(), channel::<()>());
    bench.meanwhile.before_next(Call::cuEventQuery, move || {
        reached.0.send(()).unwrap();
        let _ = gone.recv();
    });
    first.close_deferred();
    reached.1.recv().unwrap();
    destroy(&bench, graph);
    bench.wait_until(|_| resource.statistics().in_graphs == 0);
    // It is handed over a moment after it is counted.
    std::thread::sleep(Duration::from_millis(20));
    bench.faults.fail(Call::cuDevicePrimaryCtxRetain, 1, CUresult::UNKNOWN, When::Before);
    buffer.close_deferred();
    drop(go);
    bench.wait_until(|bench| bench.faults.fired() == 1);
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(resource.drain(soon), Err(Error::StillPending { buffers: 3 }));
    drop(held);
    settle(&resource);
    drop((resource, foreign));
    bench.assert_clean();
}

const ROLE: &str = "CUVMM_RESOURCE_END_WITH_GRAPHS";

/// One that lives, one that was destroyed just now, whose destructor may be running, and one whose run goes on.
#[test]
fn a_process_ends_quietly_with_memory_in_graphs() {
    if std::env::var_os(ROLE).is_some() {
        let bench = Bench::small();
        let foreign = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
        let buffers = [(); 3].map(|()| buffer_of(&bench));
        let graphs = [(); 3].map(|()| graph_of(&bench));
        buffers.iter().zip(graphs).for_each(|(buffer, graph)| retain(buffer, graph).unwrap());
        let [_, gone, in_flight] = graphs;
        // SAFETY: the graph is alive.
        let executable = unsafe { bench.driver.graph_instantiate(in_flight) }.unwrap();
        let held = Held::queue(foreign.stream, &buffers[0]);
        // SAFETY: both are alive, and the graph has no nodes.
        unsafe { bench.driver.graph_launch(executable, foreign.stream) }.unwrap();
        // SAFETY: it is the test's.
        unsafe { bench.driver.graph_exec_destroy(executable) }.unwrap();
        drop(buffers);
        destroy(&bench, in_flight);
        destroy(&bench, gone);
        // The end of the stream's context would wait for its work.
        std::mem::forget((held, foreign));
        return;
    }
    for _ in 0..20 {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["a_process_ends_quietly_with_memory_in_graphs", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, "")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", output.status);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

/// What is tied to a graph: a graph that was made by hand, or the one of a capture.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Of {
    Graph,
    Capture,
}

/// Gives a buffer to such a graph, after `plan`, ends both, and says how the first went, by which calls.
fn give(bench: &Bench, of: Of, buffer: VirtualMemoryBuffer, plan: impl FnOnce()) -> (Result<(), Error>, Vec<Call>) {
    let foreign = Foreign::new(bench, CUstream_flags::NON_BLOCKING);
    let stream = StreamRef::from_owner(foreign.clone()).unwrap();
    let graph = graph_of(bench);
    if of == Of::Capture {
        begin_capture(&foreign);
    }
    bench.simulator.clear_calls();
    plan();
    let given = if of == Of::Graph { retain(&buffer, graph) } else { retain_captured(&buffer, &stream) };
    let calls = bench.simulator.calls();
    bench.faults.clear();
    buffer.close().unwrap();
    destroy(bench, graph);
    assert!(of == Of::Graph || end_capture(&foreign));
    (given, calls)
}

/// Each call fails in turn, before it takes effect and after. The thread is another each time: its context and mode may stay
/// changed where it was the call that restores them.
#[test]
fn whatever_call_fails_the_memory_goes_when_the_graph_does() {
    let cases = [Of::Graph, Of::Capture].map(|of| {
        let bench = Bench::small();
        let (given, calls) = give(&bench, of, buffer_of(&bench), || {});
        given.unwrap();
        (of, calls)
    });
    assert_eq!(
        cases[0].1,
        [Call::cuCtxGetCurrent, Call::cuUserObjectCreate, Call::cuGraphRetainUserObject, Call::cuUserObjectRelease]
    );
    assert_eq!(cases[1].1.len(), 9, "and a session around one question: {:?}", cases[1].1);
    for (of, calls) in cases {
        for (index, call) in calls.iter().copied().enumerate() {
            let nth = calls[..=index].iter().filter(|other| **other == call).count();
            for code in [CUresult::UNKNOWN, CUresult::DEINITIALIZED] {
                require_nothing_left(of, call, nth, code, When::Before);
            }
            require_nothing_left(of, call, nth, CUresult::UNKNOWN, When::After);
        }
    }
}

fn require_nothing_left(of: Of, call: Call, nth: usize, code: CUresult, when: When) {
    let what = format!("{of:?}, {call} {nth}, {code}, {when:?}");
    let bench = Arc::new(Bench::small());
    let buffer = buffer_of(&bench);
    let resource = buffer.resource().clone();
    let held = Arc::clone(&bench);
    let given = std::thread::spawn(move || {
        let plan = || held.faults.fail(call, nth, code, when);
        give(&held, of, buffer, plan).0
    });
    let error = given.join().unwrap().unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(call), Some(code)), "{what}");
    // What nobody can give back is alive, and counted.
    let is_kept = call == Call::cuUserObjectRelease && when == When::Before;
    let is_undoing = [Call::cuUserObjectRelease, Call::cuCtxPopCurrent].contains(&call)
        || (call, nth) == (Call::cuThreadExchangeStreamCaptureMode, 2);
    if is_kept {
        assert_eq!(resource.statistics().in_graphs, 1, "{what}");
    } else {
        settle(&resource);
    }
    let kept = usize::from(is_kept);
    // A driver that says that it made no user object has none, whatever a simulated one is made to say.
    let is_lost = usize::from((call, when) == (Call::cuUserObjectCreate, When::After));
    let live = bench.simulator.live();
    let found = [live.mappings, live.reservations, live.allocations, live.user_objects];
    assert_eq!(found, [kept, kept, kept, kept + is_lost], "{what}");
    assert_eq!((live.graphs, live.streams, live.contexts), (0, 0, 0), "{what}");
    assert_eq!(bench.simulator.violations(), [], "{what}");
    // Of a driver that has shut down nothing is counted.
    let is_counted = code != CUresult::DEINITIALIZED;
    assert_eq!(bench.driver.stranded().total(), usize::from(is_undoing && is_counted), "{what}");
    let of_memory = usize::from(call == Call::cuUserObjectRelease && is_counted);
    assert_eq!(bench.driver.stranded().count(StrandedKind::Buffer), of_memory, "{what}");
    assert_eq!(resource.statistics().stranded, of_memory, "{what}");
}

#[test]
fn of_two_failures_the_first_is_told() {
    let bench = Bench::small();
    let (graph, buffer) = (graph_of(&bench), buffer_of(&bench));
    bench.faults.fail(Call::cuGraphRetainUserObject, 1, CUresult::OUT_OF_MEMORY, When::Before);
    bench.faults.fail(Call::cuUserObjectRelease, 1, CUresult::UNKNOWN, When::Before);
    let error = retain(&buffer, graph).unwrap_err();
    assert_eq!((error.call(), bench.faults.fired()), (Some(Call::cuGraphRetainUserObject), 2));
    assert_eq!(bench.driver.stranded().count(StrandedKind::Buffer), 1);
    destroy(&bench, graph);
    assert_eq!(bench.simulator.live().user_objects, 1);
}
