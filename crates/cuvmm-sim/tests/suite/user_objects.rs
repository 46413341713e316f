//! User objects: rules R97, R99 and R100, and question Q18.

use std::sync::mpsc::{Receiver, channel};
use std::thread::ThreadId;
use std::time::Duration;

use cuvmm_driver::sys::*;
use cuvmm_sim::Preset;

use crate::calls::fire;
use crate::common::{Gpu, ok};

const NON_BLOCKING: CUstream_flags = CUstream_flags::NON_BLOCKING;
/// Long enough for whatever would happen.
const SOON: Duration = Duration::from_secs(20);
/// Long enough for what must not happen to be noticed.
const WHILE: Duration = Duration::from_millis(30);

fn fires(seen: &Receiver<ThreadId>) -> bool {
    seen.recv_timeout(SOON).is_ok()
}

fn stays(seen: &Receiver<ThreadId>) -> bool {
    seen.recv_timeout(WHILE).is_err()
}

#[test]
fn a_destructor_runs_once_elsewhere_after_the_last_reference() {
    for gpu in Gpu::both() {
        let (object, seen) = gpu.object(2);
        assert_eq!(gpu.object_retain(object, 3), 0);
        assert_eq!([gpu.object_release(object, 1), gpu.object_release(object, 3)], [0, 0]);
        assert!(stays(&seen));
        assert_eq!(gpu.simulator.live().user_objects, 1);
        assert_eq!(gpu.object_release(object, 1), 0);
        assert_ne!(seen.recv_timeout(SOON).unwrap(), std::thread::current().id());
        assert!(seen.recv_timeout(SOON).is_err(), "once");
        assert_eq!(gpu.simulator.live().user_objects, 0);
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn a_user_object_needs_a_destructor_and_counts_in_range() {
    for gpu in Gpu::both() {
        let create = |destroy, references, flags| {
            let mut object = CUuserObject::NULL;
            let data = std::ptr::null_mut();
            // SAFETY: the output is a local; no such object is ever made.
            let code = unsafe { gpu.raw().cuUserObjectCreate(&raw mut object, data, destroy, references, flags) };
            ok(code, ())
        };
        let table: [(CUhostFn, u32, u32); 5] =
            [(None, 1, 1), (Some(fire), 0, 1), (Some(fire), 1 << 31, 1), (Some(fire), 1, 0), (Some(fire), 1, 3)];
        for (destroy, references, flags) in table {
            assert_eq!(create(destroy, references, flags), Err(1), "{references} {flags}");
        }
        let ((object, seen), graph) = (gpu.object(1), gpu.graph());
        for count in [0, 1 << 31] {
            assert_eq!([gpu.object_retain(object, count), gpu.object_release(object, count)], [1, 1]);
            assert_eq!([gpu.graph_retain(graph, object, count, 0), gpu.graph_release(graph, object, count)], [1, 1]);
        }
        assert_eq!(gpu.graph_retain(graph, object, 1, 2), 1, "an unknown flag");
        assert_eq!(gpu.violations(), [""; 0]);
        let lax = gpu.simulator.machine().preset == Preset::Measured;
        assert_eq!(gpu.graph_release(graph, object, 1), u32::from(!lax), "it has none");
        assert_eq!(gpu.violations().len(), 1);
        // The caller pays for it where it is done.
        assert!(if lax { fires(&seen) } else { stays(&seen) });
    }
}

#[test]
fn nobody_gives_back_more_than_is_his() {
    for gpu in Gpu::both() {
        let ((object, seen), graph) = (gpu.object(1), gpu.graph());
        assert_eq!(gpu.graph_retain(graph, object, 2, 0), 0);
        assert_eq!(gpu.object_release(object, 2), 1);
        assert_eq!(gpu.graph_retain(graph, object, 2, 1), 1, "there are not so many to move");
        assert_eq!(gpu.violations().len(), 2);
        assert_eq!(gpu.object_release(object, 1), 0);
        assert!(stays(&seen));
        assert_eq!([gpu.graph_release(graph, object, 1), gpu.graph_release(graph, object, 1)], [0, 0]);
        assert!(fires(&seen));
        assert_eq!([gpu.object_retain(object, 1), gpu.object_release(object, 1)], [1, 1]);
        assert_eq!(gpu.violations().len(), 4, "it is gone");
    }
}

#[test]
fn references_moved_to_a_graph_are_the_callers_no_more() {
    for gpu in Gpu::both() {
        let ((object, seen), graph) = (gpu.object(3), gpu.graph());
        assert_eq!(gpu.graph_retain(graph, object, 3, 1), 0);
        assert!(stays(&seen));
        assert_eq!(gpu.graph_destroy(graph), 0);
        assert!(fires(&seen), "all three went with the graph");
    }
}

#[test]
fn an_executable_keeps_what_its_graph_had() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let ((object, seen), graph) = (gpu.object(1), gpu.graph());
        assert_eq!(gpu.graph_retain(graph, object, 1, 1), 0);
        let executable = gpu.instantiate(graph);
        assert_eq!(gpu.graph_destroy(graph), 0);
        assert!(stays(&seen), "the graph is gone, and what was made from it is not");
        assert_eq!(gpu.executable_destroy(executable), 0);
        assert!(fires(&seen));
    }
}

#[test]
fn an_executable_in_flight_keeps_its_objects_until_it_landed() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let ((object, seen), graph, stream) = (gpu.object(1), gpu.graph(), gpu.stream(NON_BLOCKING));
        assert_eq!(gpu.graph_retain(graph, object, 1, 1), 0);
        let executable = gpu.instantiate(graph);
        assert_eq!(gpu.graph_destroy(graph), 0);
        let gate = gpu.hold(stream);
        assert_eq!(gpu.launch(executable, stream), 0);
        assert_eq!(gpu.executable_destroy(executable), 0);
        assert!(stays(&seen));
        gate.open();
        assert!(fires(&seen));
    }
}

#[test]
fn a_graph_that_is_being_captured_takes_references() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        for ends in [true, false] {
            let (object, seen) = gpu.object(1);
            assert_eq!(gpu.begin(stream, CUstreamCaptureMode::GLOBAL), 0);
            // SAFETY: the stream is alive.
            let info = unsafe { gpu.driver.stream_get_capture_info(stream) }.unwrap();
            let graph = gpu.captured_graph(stream);
            assert_eq!(info.status, CUstreamCaptureStatus::ACTIVE);
            assert_eq!(gpu.graph_retain(graph, object, 1, 1), 0);
            if ends {
                assert_eq!(gpu.end(stream), Ok(graph));
                assert!(stays(&seen));
                assert_eq!(gpu.graph_destroy(graph), 0);
            } else {
                assert_eq!(gpu.synchronize(stream), 900);
                assert!(stays(&seen));
                assert_eq!(gpu.end(stream), Err(901));
            }
            assert!(fires(&seen), "its graph is gone");
        }
    }
}

#[test]
fn a_launch_that_a_capture_refused_keeps_nothing() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let ((object, seen), graph, stream) = (gpu.object(1), gpu.graph(), gpu.stream(NON_BLOCKING));
        assert_eq!(gpu.graph_retain(graph, object, 1, 1), 0);
        let inner = gpu.instantiate(graph);
        assert_eq!(gpu.begin(stream, CUstreamCaptureMode::GLOBAL), 0);
        assert_eq!((gpu.launch(inner, stream), gpu.end(stream)), (900, Err(901)));
        assert_eq!([gpu.graph_destroy(graph), gpu.executable_destroy(inner)], [0, 0]);
        assert!(fires(&seen));
    }
}

#[test]
fn calls_in_a_destructor_are_refused() {
    for gpu in Gpu::both() {
        let (codes, answers) = channel();
        let driver = gpu.driver.clone();
        let (object, seen) = gpu.object_doing(1, move || {
            let (mut context, mut count, mut status) = (CUcontext::NULL, 0, CUstreamCaptureStatus(7));
            // SAFETY: the outputs are locals.
            let answer = unsafe {
                [
                    driver.raw().cuCtxGetCurrent(&raw mut context),
                    driver.raw().cuMemUnmap(CUdeviceptr(0), 0),
                    driver.raw().cuDeviceGetCount(&raw mut count),
                    driver.raw().cuStreamIsCapturing(CUstream::LEGACY, &raw mut status),
                ]
            };
            codes.send(answer.map(|code| code.0)).unwrap();
        });
        assert_eq!(gpu.object_release(object, 1), 0);
        assert!(fires(&seen));
        assert_eq!(answers.recv().unwrap(), [800, 800, 800, 201], "the last is let through, to no context");
        assert_eq!(gpu.violations().len(), 4);
        assert!(gpu.violations().iter().all(|text| text.ends_with("a call in the destructor of a user object")));
    }
}

#[test]
fn a_destructor_that_takes_its_time_delays_no_call() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (go, held) = channel::<()>();
        let (object, seen) = gpu.object_doing(1, move || _ = held.recv());
        let (second, later) = gpu.object(1);
        assert_eq!([gpu.object_release(object, 1), gpu.object_release(second, 1)], [0, 0]);
        gpu.close(gpu.buffer(crate::common::UNIT));
        assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
        assert!(stays(&seen) && stays(&later));
        drop(go);
        assert!(fires(&seen) && fires(&later));
    }
}

#[test]
fn a_driver_that_is_gone_runs_no_destructor() {
    let gpu = Gpu::strict();
    let ((_owned, seen), graph) = (gpu.object(1), gpu.graph());
    let (given, also) = gpu.object(1);
    assert_eq!(gpu.graph_retain(graph, given, 1, 1), 0);
    drop(gpu);
    assert!(stays(&seen) && stays(&also), "as when a process exits");
}
