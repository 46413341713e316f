//! Allocating.

use cuvmm::driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm::handles::Allocation;
use cuvmm::{CUresult, Call};
use cuvmm_tests::matrix::{Failing, Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, G, MIB};

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
