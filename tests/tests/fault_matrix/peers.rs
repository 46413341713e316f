//! Making and growing memory that a second device reaches.

use cuvmm::{Access, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::matrix::{Row, Scene, none};
use cuvmm_tests::{Backend, G, ROOM};

use crate::enclosed;
use crate::grow::behind_or_moved;

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "new",
        path: "with a peer",
        set_up: |backend| Scene::empty(backend.resource_with(with_peer(backend))),
        operate: |scene| {
            let options = scene.resource.options().clone();
            drop(VirtualMemoryResource::new(scene.resource.device(), options)?);
            Ok(None)
        },
        exception: none,
    },
    Row {
        operation: "allocate",
        path: "with a peer",
        set_up: |backend| Scene::empty(backend.resource_with(with_peer(backend))),
        operate: |scene| Ok(Some(scene.resource.allocate(G)?)),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "with a peer, within the capacity",
        set_up: |backend| Scene::of(allocate(backend)),
        operate: |scene| Ok(Some(scene.buffer().grow(3 * G)?)),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "with a peer, moved",
        set_up: |backend| enclosed(allocate(backend)),
        operate: |scene| Ok(Some(scene.buffer().grow(ROOM + G)?)),
        exception: behind_or_moved,
    },
];

fn with_peer(backend: &Backend) -> Options {
    Options::new().peer(&backend.driver.device(1).unwrap(), Access::Read)
}

fn allocate(backend: &Backend) -> VirtualMemoryBuffer {
    backend.resource_with(with_peer(backend)).allocate_with_capacity(G, ROOM).unwrap()
}
