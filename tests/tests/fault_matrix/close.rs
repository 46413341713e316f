//! Closing and dropping.

use std::time::{Duration, Instant};

use cuvmm::handles::Reservation;
use cuvmm::{CUresult, Call, Error, Options, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::matrix::{Failing, Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, G, ROOM, Ranges, Stream, occupy_behind};

use crate::grow::waiting;
use crate::{chunked, chunked_of, deferring, drain, keeping, unattended};

/// Longer than what is waited for takes.
const LONG: Duration = Duration::from_secs(30);

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "close",
        path: "one chunk",
        set_up: |backend| unattended(chunked(backend, 1, G)),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close",
        path: "three chunks, each in a reservation of its own",
        set_up: |backend| unattended(side_by_side(backend)),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close",
        path: "three chunks that moved",
        set_up: |backend| unattended(moved(backend)),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close",
        path: "two chunks that are kept",
        set_up: |backend| unattended(chunked_of(&keeping(backend, 8, &[]), 2, 8 * G)),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close",
        path: "three chunks where there is room for two",
        set_up: |backend| unattended(chunked_of(&keeping(backend, 2, &[2]), 3, 8 * G)),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close_deferred",
        path: "two chunks that are kept",
        set_up: |backend| unattended(chunked_of(&keeping(backend, 8, &[]), 2, 8 * G)),
        operate: close_deferred,
        exception: silent,
    },
    Row {
        operation: "close",
        path: "no memory, with capacity",
        set_up: |backend| unattended(backend.resource().allocate_with_capacity(0, 4 * G).unwrap()),
        operate: close,
        exception: nothing_to_wait_for,
    },
    Row {
        operation: "close",
        path: "memory that another maps",
        set_up: |backend| beside_an_alias(backend, G),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close",
        path: "a chunk behind what another maps",
        set_up: |backend| beside_an_alias(backend, 2 * G),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close",
        path: "waiting for the default stream",
        set_up: |backend| Scene::of(chunked(backend, 1, G)),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close",
        path: "waiting for a stream and a fence",
        set_up: |backend| waiting(backend, Scene::of(chunked(backend, 1, G))),
        operate: close,
        exception: none,
    },
    Row {
        operation: "close_on",
        path: "waiting for that stream and a fence",
        set_up: |backend| {
            let mut scene = waiting(backend, Scene::of(chunked(backend, 1, G)));
            scene.streams.insert(0, Stream::non_blocking(&backend.device));
            scene
        },
        operate: |scene| {
            let stream: StreamRef = scene.streams[0].clone();
            let closed = scene.take().close_on(&stream);
            settle(scene, closed)
        },
        exception: none,
    },
    Row {
        operation: "close_within",
        path: "one chunk, waiting for nothing, at once",
        set_up: |backend| unattended(chunked(backend, 1, G)),
        operate: |scene| close_within(scene, Duration::ZERO),
        exception: none,
    },
    Row {
        operation: "close_within",
        path: "waiting for the default stream",
        set_up: |backend| Scene::of(chunked(backend, 1, G)),
        operate: |scene| close_within(scene, LONG),
        exception: none,
    },
    Row {
        operation: "close_within",
        path: "waiting for a stream and a fence",
        set_up: |backend| waiting(backend, Scene::of(chunked(backend, 1, G))),
        operate: |scene| close_within(scene, LONG),
        exception: none,
    },
    Row {
        operation: "drop",
        path: "one chunk",
        set_up: |backend| unattended(chunked(backend, 1, G)),
        operate: dropped,
        exception: silent,
    },
    Row {
        operation: "drop",
        path: "three chunks, each in a reservation of its own",
        set_up: |backend| unattended(side_by_side(backend)),
        operate: dropped,
        exception: silent,
    },
    Row {
        operation: "drop",
        path: "waiting for the default stream",
        set_up: |backend| Scene::of(chunked(backend, 1, G)),
        operate: dropped,
        exception: silent,
    },
    Row {
        operation: "drop",
        path: "waiting for a stream and a fence",
        set_up: |backend| waiting(backend, Scene::of(chunked(backend, 1, G))),
        operate: dropped,
        exception: silent,
    },
    Row {
        operation: "drop",
        path: "deferred, three chunks",
        set_up: |backend| unattended(deferring(backend, 3, 8 * G)),
        operate: dropped,
        exception: silent,
    },
    Row {
        operation: "drop",
        path: "deferred, waiting for the default stream",
        set_up: |backend| Scene::of(deferring(backend, 1, G)),
        operate: dropped,
        exception: silent,
    },
    Row {
        operation: "drop",
        path: "deferred, waiting for a stream and a fence",
        set_up: |backend| waiting(backend, Scene::of(deferring(backend, 1, G))),
        operate: dropped,
        exception: silent,
    },
    Row {
        operation: "close_deferred",
        path: "no memory, with capacity",
        set_up: |backend| unattended(backend.resource().allocate_with_capacity(0, 4 * G).unwrap()),
        operate: close_deferred,
        exception: silent,
    },
    Row {
        operation: "close_deferred",
        path: "three chunks",
        set_up: |backend| unattended(chunked(backend, 3, 8 * G)),
        operate: close_deferred,
        exception: silent,
    },
    Row {
        operation: "close_deferred",
        path: "a chunk behind what another maps",
        set_up: |backend| beside_an_alias(backend, 2 * G),
        operate: close_deferred,
        exception: silent,
    },
    Row {
        operation: "close of the resource",
        path: "three chunks pending, and a clone",
        set_up: |backend| unattended(deferring(backend, 3, 8 * G)),
        operate: close_resource,
        exception: silent,
    },
    Row {
        operation: "close of the resource",
        path: "a buffer pending that waits for a stream and a fence, and a clone",
        set_up: |backend| waiting(backend, Scene::of(deferring(backend, 1, G))),
        operate: close_resource,
        exception: silent,
    },
    Row {
        operation: "drain",
        path: "after a drop of what two map",
        set_up: |backend| {
            let first = deferring(backend, 1, 8 * G);
            first.set_release(Release::Caller).unwrap();
            let mut scene = Scene::of(first.grow(2 * G).unwrap());
            scene.aliases.push(first);
            scene
        },
        operate: |scene| {
            scene.aliases.clear();
            dropped(scene)
        },
        exception: silent,
    },
    Row {
        operation: "close_deferred",
        path: "waiting for a stream and a fence",
        set_up: |backend| waiting(backend, Scene::of(chunked(backend, 1, G))),
        operate: close_deferred,
        exception: silent,
    },
];

fn side_by_side(backend: &Backend) -> VirtualMemoryBuffer {
    let size = Reservation::GRANULARITY.exact(8 * ROOM).unwrap();
    // Where so many addresses are free together each part can be had behind the other, unless somebody else is quicker.
    for _ in 0..64 {
        let free = Reservation::reserve(&backend.driver, size, 0).unwrap();
        let options = Options::new().address_hint(free.address());
        free.close().unwrap();
        let resource = VirtualMemoryResource::new(&backend.device, options).unwrap();
        let buffer = resource.allocate(ROOM).unwrap().grow_into(2 * ROOM).unwrap().grow_into(3 * ROOM).unwrap();
        if Ranges::of(&buffer).reservations.len() == 3 {
            return buffer;
        }
    }
    panic!("no buffer of 64 grew in place twice");
}

fn moved(backend: &Backend) -> VirtualMemoryBuffer {
    let buffer = chunked(backend, 2, ROOM);
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow_into(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(moved.chunks().len(), 3);
    moved
}

/// A buffer of so many bytes whose first chunk an alias maps, too.
fn beside_an_alias(backend: &Backend, size: usize) -> Scene {
    let first = chunked(backend, 1, 8 * G);
    let mut scene = unattended(first.grow(size).unwrap());
    scene.aliases.push(first);
    scene
}

pub(crate) fn close(scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let closed = scene.take().close();
    settle(scene, closed)
}

/// Puts the buffer back where it was not closed.
fn settle(scene: &mut Scene, closed: Result<(), cuvmm::CloseError>) -> Result<Option<VirtualMemoryBuffer>, Error> {
    closed.map(|()| None).map_err(|error| {
        let (error, buffer) = error.into_parts();
        scene.buffer = buffer;
        error.into()
    })
}

fn close_within(scene: &mut Scene, time: Duration) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let closed = scene.take().close_within(Instant::now() + time);
    settle(scene, closed)
}

fn dropped(scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
    drop(scene.take());
    drain(scene);
    Ok(None)
}

/// What is asked of it later is asked of a clone.
fn close_resource(scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
    drop(scene.take());
    scene.resource.clone().close(Instant::now() + LONG)?;
    Ok(None)
}

fn close_deferred(scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
    scene.take().close_deferred();
    drain(scene);
    Ok(None)
}

/// Whether the thread is in a host function is asked before anything that could wait. Here nothing does, and the call that
/// follows answers for itself.
fn nothing_to_wait_for(failing: Failing) -> Option<Verdict> {
    let is_asked = failing.step.call == Call::cuCtxGetCurrent && failing.code != CUresult::NOT_PERMITTED;
    is_asked.then_some(Verdict::Overcome)
}

/// A drop has nobody to tell.
fn silent(_: Failing) -> Option<Verdict> {
    Some(Verdict::Silent)
}
