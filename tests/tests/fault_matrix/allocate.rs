//! Allocating.

use std::sync::Mutex;
use std::time::Duration;

use cuvmm::driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm::handles::Allocation;
use cuvmm::{Access, CUresult, Call, HandleKind, Location, Options, OutOfMemory, Request};
use cuvmm_tests::matrix::{Failing, Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, G, MIB, ROOM};

use crate::grow::done_already;
use crate::keeping;

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "allocate",
        path: "one chunk",
        set_up: nothing,
        operate: |scene| Ok(Some(scene.resource.allocate(3 * MIB)?)),
        exception: none,
    },
    Row {
        operation: "allocate_with_capacity",
        path: "one chunk",
        set_up: nothing,
        operate: |scene| Ok(Some(scene.resource.allocate_with_capacity(G, 64 * MIB)?)),
        exception: fewer_addresses,
    },
    Row {
        operation: "allocate_with_capacity",
        path: "no memory",
        set_up: nothing,
        operate: |scene| Ok(Some(scene.resource.allocate_with_capacity(0, 64 * MIB)?)),
        exception: fewer_addresses,
    },
    Row {
        operation: "allocate",
        path: "three chunks",
        set_up: |backend| Scene::empty(backend.resource_with(Options::new().max_chunk(2 * G))),
        operate: |scene| Ok(Some(scene.resource.allocate(5 * G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "aligned",
        set_up: |backend| Scene::empty(backend.resource_with(Options::new().alignment(64 * MIB))),
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "where it is wished to be",
        set_up: |backend| {
            let free = backend.resource().allocate(G).unwrap();
            let options = Options::new().address_hint(free.address());
            free.close().unwrap();
            Scene::empty(backend.resource_with(options))
        },
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: elsewhere,
    },
    Row {
        operation: "allocate",
        path: "with access for nobody",
        set_up: |backend| Scene::empty(backend.resource_with(Options::new().own_access(Access::None))),
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "memory of the host",
        set_up: |backend| Scene::empty(backend.resource_with(Options::new().location(Location::Host))),
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "exported as file descriptors, for network cards",
        set_up: |backend| {
            let options = Options::new().handle_kind(HandleKind::PosixFd).rdma(Request::Required);
            Scene::empty(backend.resource_with(options))
        },
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "with a hook that frees",
        set_up: |backend| {
            let kept = Mutex::new(Some(backend.resource().allocate(G).unwrap()));
            let free = move |_: &OutOfMemory| kept.lock().unwrap().take().is_some_and(|kept| kept.close().is_ok());
            Scene::empty(backend.resource_with(Options::new().on_out_of_memory(free)))
        },
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: tried_again,
    },
    Row {
        operation: "allocate",
        path: "with a hook that does not",
        set_up: |backend| Scene::empty(backend.resource_with(Options::new().on_out_of_memory(|_| false))),
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "a chunk that is kept",
        set_up: |backend| Scene::empty(keeping(backend, 8, &[1, 2])),
        operate: |scene| Ok(Some(scene.resource.allocate(2 * G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "one chunk that is kept, and two that are made",
        set_up: |backend| Scene::empty(keeping(backend, 8, &[2])),
        operate: |scene| Ok(Some(scene.resource.allocate(5 * G)?)),
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "beside a chunk that is kept and does not fit",
        set_up: |backend| Scene::empty(keeping(backend, 8, &[1])),
        operate: |scene| Ok(Some(scene.resource.allocate(2 * G)?)),
        exception: tried_again,
    },
    Row {
        operation: "allocate",
        path: "with another try",
        set_up: |backend| {
            let options = Options::new().retry_out_of_memory(1, Duration::from_millis(1));
            Scene::empty(backend.resource_with(options))
        },
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: tried_again,
    },
    Row {
        operation: "allocate_zeroed",
        path: "for the first time",
        set_up: nothing,
        operate: |scene| Ok(Some(scene.resource.allocate_zeroed(G)?)),
        // The resource's own stream is made then, whose making enters its context and leaves it, too.
        exception: done_already,
    },
    Row {
        operation: "allocate_zeroed",
        path: "two chunks",
        set_up: |backend| {
            let resource = backend.resource_with(Options::new().max_chunk(2 * G));
            resource.allocate_zeroed(G).unwrap().close().unwrap();
            Scene::empty(resource)
        },
        operate: |scene| Ok(Some(scene.resource.allocate_zeroed_with_capacity(3 * G, ROOM)?)),
        exception: |failing| fewer_addresses(failing).or_else(|| done_already(failing)),
    },
    Row {
        operation: "map_chunks",
        path: "three chunks",
        set_up: nothing,
        operate: |scene| {
            let device = scene.resource.device().clone();
            let properties = CUmemAllocationProp::pinned(device.location(), CUmemAllocationHandleType::NONE);
            let buffer = scene.resource.map_chunks(&[G, 2 * G, G], 4 * G, |_, size| {
                Ok::<_, cuvmm_resource::Error>(Allocation::create(device.driver(), size, &properties)?)
            })?;
            Ok(Some(buffer))
        },
        exception: none,
    },
];

fn nothing(backend: &Backend) -> Scene {
    Scene::empty(backend.resource())
}

/// Where so many addresses are not there, it is fewer. None at all is an error, of which another test is.
fn fewer_addresses(failing: Failing) -> Option<Verdict> {
    let is_too_many = failing.step.call == Call::cuMemAddressReserve && failing.code == CUresult::OUT_OF_MEMORY;
    is_too_many.then_some(Verdict::Overcome)
}

/// A wish that can't be granted is none.
fn elsewhere(failing: Failing) -> Option<Verdict> {
    (failing.step.call == Call::cuMemAddressReserve).then_some(Verdict::Overcome)
}

/// Where there is not so much memory, once more is tried.
fn tried_again(failing: Failing) -> Option<Verdict> {
    let is_short = failing.step.call == Call::cuMemCreate && failing.code == CUresult::OUT_OF_MEMORY;
    is_short.then_some(Verdict::Overcome)
}
