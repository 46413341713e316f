//! Making resources.

use cuvmm::{
    CUresult, Call, Error, GranularityKind, HandleKind, Location, Options, Request, VirtualMemoryBuffer,
    VirtualMemoryResource,
};
use cuvmm_tests::matrix::{Failing, Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, Step};

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "new",
        path: "without options",
        set_up: |backend| made_once(backend, plain()),
        operate: |scene| make(scene, plain()),
        exception: none,
    },
    Row {
        operation: "new",
        path: "recommended granularity",
        set_up: |backend| made_once(backend, recommended()),
        operate: |scene| make(scene, recommended()),
        exception: none,
    },
    Row {
        operation: "new",
        path: "exported as file descriptors",
        set_up: |backend| made_once(backend, posix()),
        operate: |scene| make(scene, posix()),
        exception: none,
    },
    Row {
        operation: "new",
        path: "memory of the host",
        set_up: |backend| made_once(backend, host()),
        operate: |scene| make(scene, host()),
        exception: |failing| short_now(failing).or_else(|| tried_out(failing)),
    },
    Row {
        operation: "new",
        path: "memory of a NUMA node",
        set_up: |backend| made_once(backend, node()),
        operate: |scene| make(scene, node()),
        // A driver that does not know the attribute may have such memory.
        exception: |failing| unknown(failing).or_else(|| short_now(failing)).or_else(|| tried_out(failing)),
    },
    Row {
        operation: "new",
        path: "RDMA if supported",
        set_up: |backend| made_once(backend, rdma(Request::IfSupported)),
        operate: |scene| make(scene, rdma(Request::IfSupported)),
        exception: made_without,
    },
    Row {
        operation: "new",
        path: "RDMA required",
        set_up: |backend| made_once(backend, rdma(Request::Required)),
        operate: |scene| make(scene, rdma(Request::Required)),
        exception: tried_out,
    },
    Row {
        operation: "new",
        path: "compression if supported",
        set_up: |backend| made_once(backend, compression(Request::IfSupported)),
        operate: |scene| make(scene, compression(Request::IfSupported)),
        exception: made_without,
    },
    Row {
        operation: "new",
        path: "compression required",
        set_up: |backend| made_once(backend, compression(Request::Required)),
        operate: |scene| make(scene, compression(Request::Required)),
        exception: tried_out,
    },
];

fn plain() -> Options {
    Options::new()
}

fn recommended() -> Options {
    Options::new().granularity(GranularityKind::Recommended)
}

fn posix() -> Options {
    Options::new().handle_kind(HandleKind::PosixFd)
}

fn host() -> Options {
    Options::new().location(Location::Host)
}

fn node() -> Options {
    Options::new().location(Location::HostNuma(0))
}

fn rdma(request: Request) -> Options {
    Options::new().rdma(request)
}

fn compression(request: Request) -> Options {
    Options::new().compression(request)
}

/// A scene after a first such resource: what is tried out once a device is known by then.
fn made_once(backend: &Backend, options: Options) -> Scene {
    let resource = backend.resource();
    drop(backend.resource_with(options));
    Scene::empty(resource)
}

fn make(scene: &mut Scene, options: Options) -> Result<Option<VirtualMemoryBuffer>, Error> {
    drop(VirtualMemoryResource::new(scene.resource.device(), options)?);
    Ok(None)
}

/// What was tried out is there; that its addresses are not given back is counted.
fn tried_out(failing: Failing) -> Option<Verdict> {
    (failing.step.call == Call::cuMemAddressFree).then_some(Verdict::Overcome)
}

fn is_of_the_trial(failing: Failing) -> bool {
    let Failing { step, .. } = failing;
    // All that is asked of memory that is not made is its granularity, and that of the trial is asked first.
    step.call.to_string().starts_with("cuMem") && (step.call != Call::cuMemGetAllocationGranularity || step.nth == 1)
}

/// A driver may not know the attribute of what is asked for; that of virtual memory management is asked first.
fn unknown(failing: Failing) -> Option<Verdict> {
    let is_attribute = failing.step == Step { call: Call::cuDeviceGetAttribute, nth: 2 };
    (is_attribute && failing.code == CUresult::INVALID_VALUE).then_some(Verdict::Overcome)
}

/// What is short now may not be when it is needed.
fn short_now(failing: Failing) -> Option<Verdict> {
    let is_short = matches!(failing.code, CUresult::OUT_OF_MEMORY | CUresult::OPERATING_SYSTEM);
    (is_short && is_of_the_trial(failing)).then_some(Verdict::Overcome)
}

/// Whatever the trial of a feature answers means that it is not supported, as does an attribute that is not known. Where
/// something is short nothing was found out, and that is told.
fn made_without(failing: Failing) -> Option<Verdict> {
    let is_refused = is_of_the_trial(failing) && short_now(failing).is_none();
    unknown(failing).or_else(|| is_refused.then_some(Verdict::Overcome)).or_else(|| tried_out(failing))
}
