//! What holds for every call of the list: rules R1, R8, R9 and R97.

use std::sync::{Arc, Mutex};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, RawDriver};
use cuvmm_sim::{Machine, Preset, Simulator};

use crate::common::Gpu;
use crate::support::{EMPTY, Empty};

/// The calls that no state of the driver touches.
const STATELESS: [Call; 4] =
    [Call::cuDriverGetVersion, Call::cuGetErrorName, Call::cuGetErrorString, Call::cuGetProcAddress];

/// The calls that a state of the driver refuses: all but the stateless ones and the start itself.
fn refusable() -> impl Iterator<Item = (Call, Empty)> {
    EMPTY.iter().copied().filter(|(call, _)| !STATELESS.contains(call) && *call != Call::cuInit)
}

#[test]
fn before_the_start_every_call_of_the_list_answers_3() {
    let raw = Simulator::new(Machine::h200());
    for (call, make) in refusable().filter(|(call, _)| raw.provides(*call)) {
        assert_eq!(make(&raw), 3, "{call}");
    }
    assert_eq!(raw.calls(), []);
}

#[test]
fn after_the_shutdown_every_call_of_the_list_answers_4() {
    let gpu = Gpu::strict().with_context();
    gpu.simulator.shut_down();
    for (call, make) in refusable().filter(|(call, _)| gpu.raw().provides(*call)) {
        assert_eq!(make(gpu.raw()), 4, "{call}");
    }
}

#[test]
fn a_call_that_is_newer_than_the_driver_answers_801() {
    let version = CudaVersion(11010);
    let gpu = Gpu::new(Machine::h200().driver_version(version.0));
    let (old, new): (Vec<_>, Vec<_>) = refusable().partition(|(call, _)| call.symbol().version <= version);
    assert!(old.len() > 80 && new.len() > 8);
    for (call, make) in new {
        assert_eq!((make(gpu.raw()), gpu.raw().provides(call)), (801, false), "{call}");
    }
}

/// Calls for which nothing at all is something: no context to be current, or to be told, a copy or set of no bytes, a
/// default stream, plain memory that is none.
const OF_NOTHING: [Call; 26] = [
    Call::cuMemGetInfo,
    Call::cuDevicePrimaryCtxReset,
    Call::cuDevicePrimaryCtxRelease,
    Call::cuCtxSetCurrent,
    Call::cuCtxSynchronize,
    Call::cuStreamSynchronize,
    Call::cuStreamQuery,
    Call::cuMemFree,
    Call::cuMemcpy,
    Call::cuMemcpyAsync,
    Call::cuMemcpyHtoD,
    Call::cuMemcpyDtoH,
    Call::cuMemcpyDtoD,
    Call::cuMemcpyHtoDAsync,
    Call::cuMemcpyDtoHAsync,
    Call::cuMemcpyDtoDAsync,
    Call::cuMemcpyPeer,
    Call::cuMemcpyPeerAsync,
    Call::cuMemsetD8,
    Call::cuMemsetD16,
    Call::cuMemsetD32,
    Call::cuMemsetD8Async,
    Call::cuMemsetD16Async,
    Call::cuMemsetD32Async,
    Call::cuCtxPopCurrent,
    Call::cuFlushGPUDirectRDMAWrites,
];

#[test]
fn a_call_with_nowhere_to_write_or_nothing_to_name_is_refused() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        for (call, make) in refusable().filter(|(call, _)| !OF_NOTHING.contains(call)) {
            let code = make(gpu.raw());
            assert!(matches!(code, 1 | 201 | 400 | 401 | 500 | 801 | 900), "{call} answered {code}");
            let writes = call.parameters().first().is_some_and(|first| first.type_name.starts_with("*mut"));
            let unseen = call == Call::cuStreamEndCapture && gpu.simulator.machine().preset == Preset::Measured;
            assert!(
                !writes || matches!(code, 1 | 801) || call == Call::cuMemGetAddressRange || unseen,
                "{call} answered {code} with nowhere to write"
            );
        }
    }
}

#[test]
fn every_call_in_a_host_function_is_refused_or_harmless_and_a_violation() {
    const TOLERATED: [Call; 26] = [
        Call::cuStreamIsCapturing,
        Call::cuThreadExchangeStreamCaptureMode,
        Call::cuStreamBeginCapture,
        Call::cuStreamEndCapture,
        Call::cuStreamGetCaptureInfo,
        Call::cuStreamGetCtx,
        Call::cuStreamGetDevice,
        Call::cuStreamQuery,
        Call::cuStreamSynchronize,
        Call::cuStreamWaitEvent,
        Call::cuStreamDestroy,
        Call::cuEventRecord,
        Call::cuEventQuery,
        Call::cuEventSynchronize,
        Call::cuEventDestroy,
        Call::cuLaunchHostFunc,
        Call::cuMemsetD8Async,
        Call::cuMemsetD16Async,
        Call::cuMemsetD32Async,
        Call::cuGraphLaunch,
        Call::cuGraphAddHostNode,
        Call::cuGraphRetainUserObject,
        Call::cuGraphReleaseUserObject,
        Call::cuUserObjectCreate,
        Call::cuUserObjectRetain,
        Call::cuUserObjectRelease,
    ];
    for gpu in Gpu::both() {
        let gpu = Arc::new(gpu.with_context());
        let stream = gpu.stream(CUstream_flags::NON_BLOCKING);
        gpu.simulator.clear_violations();
        let answers = Arc::new(Mutex::new(Vec::new()));
        let (inside, told) = (gpu.clone(), answers.clone());
        let work = move || {
            let made = refusable().map(|(call, make)| (call, make(inside.raw())));
            told.lock().unwrap().extend(made);
        };
        assert_eq!(gpu.host(stream, work), 0);
        assert_eq!(gpu.synchronize(stream), 0);
        let answers = answers.lock().unwrap();
        assert_eq!(answers.len(), refusable().count());
        for &(call, code) in answers.iter() {
            let refused = [800, 801].contains(&code) || TOLERATED.contains(&call);
            assert!(refused && code != 0, "{call} answered {code}");
            assert!(code != 800 || !TOLERATED.contains(&call), "{call} answered {code}");
        }
        assert!(gpu.violations().len() >= answers.iter().filter(|(_, code)| *code == 800).count());
    }
}
