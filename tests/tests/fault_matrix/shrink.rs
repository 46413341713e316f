//! Shrinking.

use cuvmm::{Error, VirtualMemoryBuffer};
use cuvmm_tests::matrix::{Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, G, ROOM, with_room_behind};

use crate::grow::{settle, waiting};
use crate::{chunked, deferring, drain, unattended};

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "truncate_into",
        path: "fewer chunks, waiting for nothing",
        set_up: |backend| unattended(chunked(backend, 3, 8 * G)),
        operate: |scene| truncate_into(scene, G),
        exception: none,
    },
    Row {
        operation: "truncate_into",
        path: "a reservation less, waiting for nothing",
        set_up: |backend| unattended(across(backend)),
        operate: |scene| truncate_into(scene, G),
        exception: none,
    },
    Row {
        operation: "truncate_into",
        path: "nothing, waiting for nothing",
        set_up: |backend| unattended(chunked(backend, 2, 8 * G)),
        operate: |scene| truncate_into(scene, 0),
        exception: none,
    },
    Row {
        operation: "truncate_into",
        path: "fewer chunks, waiting for a stream and a fence",
        set_up: |backend| waiting(backend, Scene::of(chunked(backend, 2, 8 * G))),
        operate: |scene| truncate_into(scene, G),
        exception: none,
    },
    Row {
        operation: "truncate_into",
        path: "fewer chunks, deferring, waiting for a stream and a fence",
        set_up: |backend| waiting(backend, Scene::of(deferring(backend, 3, 8 * G))),
        operate: |scene| {
            let shorter = truncate_into(scene, G);
            drain(scene);
            shorter
        },
        exception: |_| Some(Verdict::Silent),
    },
];

/// A buffer that goes on in a second reservation.
fn across(backend: &Backend) -> VirtualMemoryBuffer {
    let mut others = Vec::new();
    while others.len() < 64 {
        let buffer = with_room_behind(&backend.resource(), G).grow_into(ROOM + G).unwrap();
        if buffer.chunks().len() == 3 {
            return buffer;
        }
        others.push(buffer);
    }
    panic!("no buffer of 64 grew in place");
}

fn truncate_into(scene: &mut Scene, size: usize) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let resized = scene.take().truncate_into(size);
    settle(scene, size, resized)
}
