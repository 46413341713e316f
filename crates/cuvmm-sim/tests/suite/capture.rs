//! Captures: rules R92 to R96, and launching what was captured.

use cuvmm_driver::sys::*;

use crate::common::{Gpu, UNIT, ok};

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::GLOBAL;
const THREAD_LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::RELAXED;
const MODES: [CUstreamCaptureMode; 3] = [GLOBAL, THREAD_LOCAL, RELAXED];
const NON_BLOCKING: CUstream_flags = CUstream_flags::NON_BLOCKING;

impl Gpu {
    pub(crate) fn begin(&self, stream: CUstream, mode: CUstreamCaptureMode) -> u32 {
        // SAFETY: numbers alone.
        unsafe { self.raw().cuStreamBeginCapture(stream, mode) }.0
    }

    pub(crate) fn end(&self, stream: CUstream) -> Result<CUgraph, u32> {
        let mut graph = CUgraph(std::ptr::without_provenance_mut(7));
        // SAFETY: the output is a local.
        let code = unsafe { self.raw().cuStreamEndCapture(stream, &raw mut graph) };
        assert_eq!(graph.is_null(), !code.is_success(), "a failure gives no graph");
        ok(code, graph)
    }

    pub(crate) fn status(&self, stream: CUstream) -> Result<u32, u32> {
        let mut status = CUstreamCaptureStatus(77);
        // SAFETY: the output is a local.
        let code = unsafe { self.raw().cuStreamIsCapturing(stream, &raw mut status) };
        ok(code, status.0)
    }

    /// Exchanges this thread's mode.
    pub(crate) fn exchange(&self, mut mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
        // SAFETY: it is a local.
        assert_eq!(unsafe { self.raw().cuThreadExchangeStreamCaptureMode(&raw mut mode) }.0, 0);
        mode
    }

    pub(crate) fn instantiate(&self, graph: CUgraph) -> CUgraphExec {
        let mut executable = CUgraphExec::NULL;
        // SAFETY: the output is a local.
        let code = unsafe { self.raw().cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) };
        assert_eq!(code.0, 0);
        executable
    }

    pub(crate) fn launch(&self, executable: CUgraphExec, stream: CUstream) -> u32 {
        // SAFETY: numbers alone.
        unsafe { self.raw().cuGraphLaunch(executable, stream) }.0
    }
}

/// A call that waits, with the stream and the event that it may wait for.
type Waiting = fn(&Gpu, CUstream, CUevent) -> u32;

/// What waits, or allocates, on other streams than the one that captures.
fn waits() -> Vec<(&'static str, Waiting)> {
    vec![
        ("stream synchronize", |gpu, stream, _| gpu.synchronize(stream)),
        ("stream query", |gpu, stream, _| gpu.query(stream)),
        ("event synchronize", |gpu, _, event| gpu.event_synchronize(event)),
        ("event query", |gpu, _, event| gpu.event_query(event)),
        ("plain allocation", |gpu, _, _| {
            let mut plain = CUdeviceptr(0);
            // SAFETY: the output is a local.
            unsafe { gpu.raw().cuMemAlloc(&raw mut plain, 1) }.0
        }),
        ("legacy synchronize", |gpu, _, _| gpu.synchronize(CUstream::LEGACY)),
        ("per-thread synchronize", |gpu, _, _| gpu.synchronize(CUstream::PER_THREAD)),
    ]
}

#[test]
fn captured_work_is_recorded_and_not_run() {
    for mode in MODES {
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let stream = gpu.stream(NON_BLOCKING);
            let buffer = gpu.buffer(UNIT);
            assert_eq!(gpu.status(stream), Ok(0));
            assert_eq!(gpu.begin(stream, mode), 0);
            assert_eq!(gpu.status(stream), Ok(1));
            assert_eq!(gpu.begin(stream, mode), 401, "it captures already");
            assert_eq!(gpu.fill(buffer.address, 1, 1, stream), 0);
            let graph = gpu.end(stream).unwrap();
            assert_eq!(gpu.status(stream), Ok(0));
            assert_eq!(gpu.synchronize(stream), 0);
            assert_eq!(gpu.read(buffer.address, 1).unwrap(), [0xA5]);
            let executable = gpu.instantiate(graph);
            assert_eq!(gpu.launch(executable, stream), 0);
            assert_eq!(gpu.synchronize(stream), 0);
            assert_eq!(gpu.read(buffer.address, 1).unwrap(), [1]);
            let live = gpu.simulator.live();
            assert_eq!((live.graphs, live.executables), (1, 1));
            // SAFETY: both are alive, and nothing is launched.
            let codes = unsafe { [gpu.raw().cuGraphDestroy(graph), gpu.raw().cuGraphExecDestroy(executable)] };
            assert_eq!(codes.map(|code| code.0), [0, 0]);
            assert!(gpu.simulator.live().executables == 0 && gpu.simulator.live().graphs == 0);
        }
    }
}

#[test]
fn virtual_memory_calls_are_immediate_and_harm_no_capture() {
    for mode in MODES {
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
            let used = gpu.buffer(UNIT);
            assert_eq!(gpu.begin(stream, mode), 0);
            let buffer = gpu.buffer_of(gpu.create_exportable(UNIT), UNIT);
            let imported = gpu.import(&gpu.export(buffer.handle).unwrap()).unwrap();
            assert_eq!(gpu.release(imported), 0);
            assert_eq!(gpu.access(CUmemLocation::device(0), buffer.address), Ok(3));
            gpu.memory();
            gpu.close(buffer);
            let event = gpu.event();
            assert_eq!(gpu.record(event, other), 0);
            assert_eq!(gpu.fill(used.address, 1, 1, other), 0);
            assert_eq!(gpu.host(other, || {}), 0);
            assert_eq!(gpu.status(stream), Ok(1));
            assert!(gpu.end(stream).is_ok());
        }
    }
}

#[test]
fn a_wait_anywhere_kills_a_global_capture() {
    for (name, wait) in waits() {
        for elsewhere in [false, true] {
            for gpu in Gpu::both() {
                let context = gpu.enter(0);
                let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
                let event = gpu.event();
                assert_eq!(gpu.begin(stream, GLOBAL), 0);
                let code = std::thread::scope(|scope| match elsewhere {
                    false => wait(&gpu, other, event),
                    true => {
                        let waiting = scope.spawn(|| {
                            assert_eq!(gpu.set_current(context), 0);
                            wait(&gpu, other, event)
                        });
                        waiting.join().unwrap()
                    }
                });
                assert_eq!(code, 900, "{name}");
                assert_eq!(gpu.status(stream), Ok(2), "{name}");
                assert_eq!(gpu.end(stream), Err(901), "{name}");
                assert_eq!(gpu.status(stream), Ok(0), "an end ends it all the same");
            }
        }
    }
}

#[test]
fn a_thread_local_capture_is_killed_by_its_own_thread_alone() {
    for (name, wait) in waits() {
        for gpu in Gpu::both() {
            let context = gpu.enter(0);
            let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
            let event = gpu.event();
            assert_eq!(gpu.begin(stream, THREAD_LOCAL), 0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(gpu.set_current(context), 0);
                    assert_eq!(wait(&gpu, other, event), 0, "{name}");
                });
            });
            assert_eq!(gpu.status(stream), Ok(1));
            assert_eq!(wait(&gpu, other, event), 900, "{name}");
            assert_eq!(gpu.end(stream), Err(901));
        }
    }
}

#[test]
fn a_relaxed_thread_waits_without_harm() {
    for mode in MODES {
        for (name, wait) in waits() {
            for gpu in Gpu::both() {
                let gpu = gpu.with_context();
                let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
                let event = gpu.event();
                assert_eq!(gpu.begin(stream, mode), 0);
                assert_eq!(gpu.exchange(RELAXED), GLOBAL);
                assert_eq!(gpu.record(event, other), 0);
                let code = wait(&gpu, other, event);
                assert!([0, 600].contains(&code), "{name}: {code}");
                assert_eq!(gpu.exchange(GLOBAL), RELAXED);
                assert!(gpu.end(stream).is_ok(), "{name}");
            }
        }
    }
}

#[test]
fn waiting_for_the_capturing_stream_itself_is_fatal_in_every_mode() {
    for mode in MODES {
        for wait in [Gpu::synchronize, Gpu::query] {
            for gpu in Gpu::both() {
                let gpu = gpu.with_context();
                let stream = gpu.stream(NON_BLOCKING);
                let _ = gpu.exchange(RELAXED);
                assert_eq!(gpu.begin(stream, mode), 0);
                assert_eq!(wait(&gpu, stream), 900);
                assert_eq!(wait(&gpu, stream), 900, "lost as it is already");
                assert_eq!(gpu.end(stream), Err(901));
            }
        }
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let stream = gpu.stream(NON_BLOCKING);
            let _ = gpu.exchange(RELAXED);
            assert_eq!(gpu.begin(stream, mode), 0);
            // SAFETY: it takes nothing.
            assert_eq!(unsafe { gpu.raw().cuCtxSynchronize() }.0, 900);
            assert_eq!(gpu.end(stream), Err(901));
        }
    }
}

#[test]
fn a_capture_on_a_blocking_stream_involves_the_legacy_one() {
    type Involving = fn(&Gpu, CUevent) -> u32;
    let table: [(&str, Involving); 4] = [
        ("synchronize", |gpu, _| gpu.synchronize(CUstream::LEGACY)),
        ("record", |gpu, event| gpu.record(event, CUstream::LEGACY)),
        ("query", |gpu, _| gpu.query(CUstream::NULL)),
        ("host function", |gpu, _| gpu.host(CUstream::LEGACY, || {})),
    ];
    for mode in MODES {
        for (name, involve) in table {
            for gpu in Gpu::both() {
                let gpu = gpu.with_context();
                let (stream, event) = (gpu.stream(CUstream_flags::DEFAULT), gpu.event());
                let _ = gpu.exchange(RELAXED);
                assert_eq!(gpu.begin(stream, mode), 0);
                assert_eq!(gpu.status(CUstream::LEGACY), Err(906));
                assert_eq!(gpu.status(stream), Ok(1), "asking harms nothing");
                assert_eq!(involve(&gpu, event), 906, "{name}");
                assert_eq!(gpu.end(stream), Err(901), "{name}");
                assert_eq!(gpu.status(CUstream::LEGACY), Ok(0));
            }
        }
    }
}

#[test]
fn the_legacy_stream_does_not_capture_nor_does_any_twice() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        assert_eq!(gpu.begin(CUstream::LEGACY, GLOBAL), 900);
        assert_eq!(gpu.begin(CUstream::NULL, RELAXED), 900);
        let stream = gpu.stream(NON_BLOCKING);
        assert_eq!(gpu.begin(stream, CUstreamCaptureMode(3)), 1);
        assert_eq!(gpu.end(stream), Err(401), "nothing was begun");
        assert_eq!(gpu.begin(CUstream::PER_THREAD, GLOBAL), 0);
        assert_eq!(gpu.begin(CUstream::PER_THREAD, GLOBAL), 401, "it captures already");
        assert!(gpu.end(CUstream::PER_THREAD).is_ok());
    }
}

#[test]
fn an_end_is_for_the_thread_that_began_unless_relaxed() {
    for (mode, expected) in [(GLOBAL, Some(908)), (THREAD_LOCAL, Some(908)), (RELAXED, None)] {
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let stream = gpu.stream(NON_BLOCKING);
            assert_eq!(gpu.begin(stream, mode), 0);
            let other = std::thread::scope(|scope| scope.spawn(|| gpu.end(stream).err()).join().unwrap());
            assert_eq!(other, expected);
            assert_eq!((gpu.status(stream), gpu.end(stream)), (Ok(0), Err(401)), "it has ended, whatever was answered");
            assert!(gpu.simulator.live().graphs == usize::from(expected.is_none()));
        }
    }
}

#[test]
fn a_captured_event_forks_and_must_join() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (origin, fork) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (start, stop, buffer) = (gpu.event(), gpu.event(), gpu.buffer(UNIT));
        for joined in [true, false] {
            assert_eq!(gpu.begin(origin, RELAXED), 0);
            assert_eq!(gpu.fill(buffer.address, 1, 2, origin), 0);
            assert_eq!([gpu.record(start, origin), gpu.wait_event(fork, start)], [0, 0]);
            assert_eq!(gpu.status(fork), Ok(1), "it joined the capture");
            assert_eq!(gpu.fill(buffer.address, 2, 1, fork), 0);
            if joined {
                assert_eq!([gpu.record(stop, fork), gpu.wait_event(origin, stop)], [0, 0]);
                let executable = gpu.instantiate(gpu.end(origin).unwrap());
                assert_eq!([gpu.launch(executable, fork), gpu.synchronize(fork)], [0, 0]);
                assert_eq!(gpu.read(buffer.address, 2).unwrap(), [2, 1]);
            } else {
                assert_eq!(gpu.end(origin), Err(904));
            }
            assert_eq!(gpu.status(fork), Ok(0));
        }
        assert_eq!(gpu.begin(origin, RELAXED), 0);
        assert_eq!([gpu.record(start, origin), gpu.wait_event(fork, start)], [0, 0]);
        assert_eq!(gpu.end(fork), Err(903), "it did not begin here");
        assert_eq!([gpu.status(fork), gpu.status(origin)], [Ok(2); 2]);
        assert_eq!(gpu.end(origin), Err(901));
    }
}

#[test]
fn asking_a_captured_event_answers_907_and_kills() {
    for ask in [Gpu::event_query, Gpu::event_synchronize] {
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let (stream, event) = (gpu.stream(NON_BLOCKING), gpu.event());
            let _ = gpu.exchange(RELAXED);
            assert_eq!(gpu.begin(stream, RELAXED), 0);
            assert_eq!(gpu.record(event, stream), 0);
            assert_eq!(ask(&gpu, event), 907);
            assert_eq!(gpu.end(stream), Err(901));
        }
    }
}

#[test]
fn work_outside_a_capture_is_not_waited_for_inside_one() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (stream, other, third) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (outside, inside) = (gpu.event(), gpu.event());
        assert_eq!(gpu.record(outside, other), 0);
        assert_eq!(gpu.begin(stream, RELAXED), 0);
        assert_eq!(gpu.wait_event(stream, outside), 905);
        assert_eq!(gpu.end(stream), Err(901));
        assert_eq!([gpu.begin(stream, RELAXED), gpu.begin(third, RELAXED)], [0, 0]);
        assert_eq!(gpu.record(inside, stream), 0);
        assert_eq!(gpu.wait_event(third, inside), 902, "two captures do not merge");
        assert_eq!([gpu.end(stream), gpu.end(third)], [Err(901), Err(901)]);
    }
}

#[test]
fn a_launch_uses_what_is_mapped_then() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        let buffer = gpu.buffer(UNIT);
        assert_eq!(gpu.begin(stream, GLOBAL), 0);
        assert_eq!(gpu.fill(buffer.address, 4, 1, stream), 0);
        let executable = gpu.instantiate(gpu.end(stream).unwrap());
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        let other = gpu.create(UNIT).unwrap();
        assert_eq!(gpu.map(buffer.address, UNIT, other), 0);
        assert_eq!(gpu.grant(buffer.address, UNIT, &[crate::common::read_write(0)]), 0);
        assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream)], [0, 0]);
        assert_eq!(gpu.read(buffer.address, 1).unwrap(), [4]);
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        assert_eq!(gpu.launch(executable, stream), 0);
        assert_eq!(gpu.synchronize(stream), 719, "and what is not, breaks the context");
    }
}

#[test]
fn a_capture_needs_somewhere_for_its_graph_unless_nobody_minds() {
    for (gpu, code, goes_on) in [(Gpu::strict(), 1, true), (Gpu::measured(), 0, false)] {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        assert_eq!(gpu.begin(stream, GLOBAL), 0);
        // SAFETY: null is what is asked about.
        assert_eq!(unsafe { gpu.raw().cuStreamEndCapture(stream, std::ptr::null_mut()) }.0, code);
        assert_eq!((gpu.status(stream), gpu.end(stream).is_ok()), (Ok(u32::from(goes_on)), goes_on));
        assert_eq!(gpu.simulator.live().graphs, 1, "nobody destroyed it");
    }
}

#[test]
fn captured_work_is_looked_at_when_its_graph_is_instantiated() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        let (address, handle) = (gpu.reserve(UNIT, 0, 0).unwrap(), gpu.create(UNIT).unwrap());
        assert_eq!(gpu.map(address, UNIT, handle), 0);
        assert_eq!(gpu.begin(stream, RELAXED), 0);
        assert_eq!(gpu.fill(address, 7, 1, stream), 0, "nobody was granted it");
        let graph = gpu.end(stream).unwrap();
        let mut executable = CUgraphExec::NULL;
        // SAFETY: the graph is alive, and the output a local.
        let mut instantiate = || unsafe { gpu.raw().cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) }.0;
        assert_eq!(instantiate(), 1);
        assert_eq!(gpu.grant(address, UNIT, &[crate::common::read_write(0)]), 0);
        assert_eq!(instantiate(), 0);
        assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream)], [0, 0]);
        assert_eq!(gpu.read(address, 1).unwrap(), [7]);
    }
}

#[test]
fn a_capture_has_no_launch_of_a_graph_and_none_is_instantiated_beside_it() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        assert_eq!(gpu.begin(stream, RELAXED), 0);
        let graph = gpu.end(stream).unwrap();
        let executable = gpu.instantiate(graph);
        assert_eq!(gpu.begin(stream, GLOBAL), 0);
        assert_eq!(gpu.launch(executable, other), 0, "on another stream it is only work");
        assert_eq!(gpu.status(stream), Ok(1));
        assert_eq!([gpu.launch(executable, stream), gpu.launch(executable, stream)], [900, 901]);
        assert_eq!(gpu.end(stream), Err(901));
        assert_eq!(gpu.begin(stream, GLOBAL), 0);
        let mut again = CUgraphExec::NULL;
        // SAFETY: the graph is alive, and the output a local.
        assert_eq!(unsafe { gpu.raw().cuGraphInstantiateWithFlags(&raw mut again, graph, 0) }.0, 900);
        assert_eq!(gpu.end(stream), Err(901));
    }
}

#[test]
fn a_copy_without_a_stream_harms_no_capture_that_does_not_involve_legacy() {
    for (flags, code, status) in [(NON_BLOCKING, 0, 1), (CUstream_flags::DEFAULT, 906, 2)] {
        for gpu in Gpu::both() {
            let gpu = gpu.with_context();
            let (stream, buffer) = (gpu.stream(flags), gpu.buffer(UNIT));
            assert_eq!(gpu.begin(stream, GLOBAL), 0);
            assert_eq!(gpu.write(buffer.address, b"x"), code);
            assert_eq!(gpu.status(stream), Ok(status));
        }
    }
}

#[test]
fn a_mode_that_is_none_is_taken_by_the_lax_alone() {
    let odd = CUstreamCaptureMode(3);
    for (gpu, code, left) in [(Gpu::strict(), 1, GLOBAL), (Gpu::measured(), 0, odd)] {
        let mut mode = odd;
        // SAFETY: it is a local.
        assert_eq!(unsafe { gpu.raw().cuThreadExchangeStreamCaptureMode(&raw mut mode) }.0, code);
        assert_eq!(gpu.exchange(GLOBAL), left);
    }
}

#[test]
fn a_destroyed_stream_takes_its_capture_along() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (stream, joined, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let event = gpu.event();
        assert_eq!(gpu.begin(stream, GLOBAL), 0);
        assert_eq!([gpu.record(event, stream), gpu.wait_event(joined, event)], [0, 0]);
        assert_eq!(gpu.status(joined), Ok(1));
        assert_eq!(gpu.destroy(stream), 0);
        assert_eq!(gpu.status(joined), Ok(0), "it is in no capture any more");
        assert_eq!(gpu.synchronize(other), 0, "and there is none to harm");
        assert_eq!(gpu.begin(other, GLOBAL), 0);
        assert_eq!([gpu.record(event, other), gpu.wait_event(joined, event)], [0, 0]);
        assert_eq!(gpu.destroy(joined), 0);
        assert_eq!(gpu.end(other), Err(901), "what joined it went");
    }
}
