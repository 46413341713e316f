//! Taking over, giving back and wrapping what others made.
//!
//! # Safety
//! A range is the scene's own, made by raw calls. It is given away once, and only where the operation says that it took
//! it; no work is on it.
#![allow(unsafe_code)]

use cuvmm::{CUresult, Call, Error, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_tests::matrix::{Failing, Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, ForeignRange, G, ROOM, Stream, occupy_behind};

use crate::grow::behind_or_moved;

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "from_raw",
        path: "three mappings, with room behind",
        set_up: |backend| foreign(backend, &[2, 1, 4]),
        operate: from_raw,
        exception: answered,
    },
    Row {
        operation: "from_raw",
        path: "two mappings, without",
        set_up: |backend| foreign(backend, &[3, 13]),
        operate: from_raw,
        exception: answered,
    },
    Row {
        operation: "deallocate",
        path: "waiting for nothing",
        set_up: |backend| foreign(backend, &[3, 13]),
        operate: |scene| deallocate(scene, Release::Caller),
        exception: answered,
    },
    Row {
        operation: "deallocate",
        path: "waiting for a stream",
        set_up: |backend| {
            let mut scene = foreign(backend, &[16]);
            scene.streams.push(Stream::non_blocking(&backend.device));
            scene
        },
        operate: |scene| {
            let stream: StreamRef = scene.streams[0].clone();
            deallocate(scene, Release::Stream(stream))
        },
        exception: answered,
    },
    Row {
        operation: "wrap",
        path: "two mappings",
        set_up: |backend| foreign(backend, &[2, 1, 4]),
        operate: |scene| {
            let range = scene.foreign.as_ref().expect("a range");
            // SAFETY: the memory is the scene's, which refers to nothing in it.
            Ok(Some(unsafe { scene.resource.wrap(range.address, 3 * G) }?))
        },
        exception: answered,
    },
    Row {
        operation: "grow",
        path: "what was taken over, within the capacity",
        set_up: |backend| Scene::of(adopted(backend, &[2, 1, 4])),
        operate: |scene| Ok(Some(scene.buffer().grow(8 * G)?)),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "what was taken over, moved",
        set_up: |backend| {
            let mut scene = Scene::of(adopted(backend, &[3, 13]));
            scene.occupied = occupy_behind(scene.buffer());
            scene
        },
        operate: |scene| Ok(Some(scene.buffer().grow(ROOM + G)?)),
        exception: behind_or_moved,
    },
    Row {
        operation: "close",
        path: "what was taken over",
        set_up: |backend| Scene::of(adopted(backend, &[3, 13])),
        operate: crate::close::close,
        exception: none,
    },
];

/// A range of others, with mappings of so many granules.
fn foreign(backend: &Backend, granules: &[usize]) -> Scene {
    let range = ForeignRange::make(backend, backend.device.location(), granules, ROOM);
    Scene::beside(backend.resource(), range)
}

fn adopted(backend: &Backend, granules: &[usize]) -> VirtualMemoryBuffer {
    let range = ForeignRange::make(backend, backend.device.location(), granules, ROOM);
    // SAFETY: the range is this function's to give away.
    unsafe { backend.resource().from_raw(range.address, range.size, Release::Caller) }.unwrap()
}

fn from_raw(scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let range = scene.foreign.clone().expect("a range");
    // SAFETY: the range is the scene's to give away, which forgets it where it is taken.
    let buffer = unsafe { scene.resource.from_raw(range.address, range.size, Release::Caller) }?;
    scene.foreign = None;
    Ok(Some(buffer))
}

fn deallocate(scene: &mut Scene, release: Release) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let range = scene.foreign.clone().expect("a range");
    // SAFETY: the range is the scene's to give away, which forgets it where it is taken.
    let result = unsafe { scene.resource.deallocate(range.address, range.size, release) };
    if result.as_ref().map_or_else(|error| error.is_deallocated(), |()| true) {
        scene.foreign = None;
    }
    result.map(|()| None).map_err(|error| error.error().clone().into())
}

/// That a reference can't be retained, with this code, says that nothing is mapped there.
fn answered(failing: Failing) -> Option<Verdict> {
    let is_no = failing.step.call == Call::cuMemRetainAllocationHandle && failing.code == CUresult::INVALID_VALUE;
    is_no.then_some(Verdict::Answered(|error| {
        use cuvmm::resource::Error as Resource;
        let is_told = error.call() == Some(Call::cuMemRetainAllocationHandle);
        is_told || matches!(error, Resource::NotVmm { .. } | Resource::MappedBehindHole { .. })
    }))
}
