//! Growing.

use cuvmm::{
    Access, CUresult, Call, Error, GrowOptions, GrowthPolicy, Options, Outcome, Release, ResizeError,
    VirtualMemoryBuffer,
};
use cuvmm_tests::matrix::{Failing, Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, G, ROOM, Step, Stream, with_room_behind};

use crate::{chunked, chunked_of, deferring, drain, enclosed, keeping};

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "grow",
        path: "within the capacity",
        set_up: |backend| Scene::of(chunked(backend, 1, 16 * G)),
        operate: |scene| grow(scene, 3 * G, Outcome::InPlace),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "within the capacity, of three chunks",
        set_up: |backend| Scene::of(chunked(backend, 3, 16 * G)),
        operate: |scene| grow(scene, 5 * G, Outcome::InPlace),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "within the capacity, of no memory",
        set_up: |backend| Scene::of(backend.resource().allocate_with_capacity(0, 4 * G).unwrap()),
        operate: |scene| grow(scene, 2 * G, Outcome::InPlace),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "of nothing",
        set_up: |backend| Scene::of(backend.resource().allocate(0).unwrap()),
        operate: |scene| grow(scene, G, Outcome::Moved),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "behind the reservation",
        set_up: |backend| Scene::of(with_room_behind(&backend.resource(), ROOM)),
        operate: |scene| grow_anyhow(scene, ROOM + 2 * G),
        exception: behind_or_moved,
    },
    Row {
        operation: "grow",
        path: "across the capacity",
        set_up: |backend| Scene::of(with_room_behind(&backend.resource(), G)),
        operate: |scene| grow_anyhow(scene, ROOM + G),
        exception: behind_or_moved,
    },
    Row {
        operation: "grow",
        path: "moved",
        set_up: |backend| enclosed(chunked(backend, 1, ROOM)),
        operate: |scene| grow(scene, ROOM + G, Outcome::Moved),
        exception: behind_or_moved,
    },
    Row {
        operation: "grow",
        path: "moved, of three chunks",
        set_up: |backend| enclosed(chunked(backend, 3, ROOM)),
        operate: |scene| grow(scene, ROOM + G, Outcome::Moved),
        exception: behind_or_moved,
    },
    Row {
        operation: "grow",
        path: "moved, as an alias has the room",
        set_up: |backend| {
            let buffer = chunked(backend, 3, 8 * G);
            let alias = buffer.grow(4 * G).unwrap();
            let mut scene = Scene::of(buffer);
            scene.aliases.push(alias);
            scene
        },
        operate: |scene| grow(scene, 5 * G, Outcome::Moved),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "by several chunks",
        set_up: |backend| {
            let resource = backend.resource_with(Options::new().max_chunk(2 * G));
            Scene::of(resource.allocate_with_capacity(G, 16 * G).unwrap())
        },
        operate: |scene| grow(scene, 6 * G, Outcome::InPlace),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "by two chunks that are kept",
        set_up: |backend| Scene::of(chunked_of(&keeping(backend, 8, &[2, 2]), 2, 16 * G)),
        operate: |scene| grow(scene, 6 * G, Outcome::InPlace),
        exception: none,
    },
    Row {
        operation: "grow",
        path: "by more than is asked for",
        set_up: |backend| Scene::of(by_step(backend, 16 * G)),
        operate: |scene| grow(scene, 2 * G, Outcome::InPlace),
        exception: less_than_wished,
    },
    Row {
        operation: "grow",
        path: "moved, by more than is asked for",
        set_up: |backend| enclosed(by_step(backend, G)),
        operate: |scene| grow(scene, ROOM + 2 * G, Outcome::Moved),
        exception: |failing| less_than_wished(failing).or_else(|| behind_twice_or_moved(failing)),
    },
    Row {
        operation: "grow_in_place",
        path: "within the capacity",
        set_up: |backend| Scene::of(chunked(backend, 2, 16 * G)),
        operate: |scene| Ok(Some(scene.buffer().grow_in_place(3 * G)?)),
        exception: none,
    },
    Row {
        operation: "grow_in_place",
        path: "across the capacity",
        set_up: |backend| Scene::of(with_room_behind(&backend.resource(), G)),
        operate: |scene| Ok(Some(scene.buffer().grow_in_place(ROOM + G)?)),
        exception: behind_or_not,
    },
    Row {
        operation: "grow_zeroed",
        path: "within the capacity",
        set_up: |backend| Scene::of(chunked(backend, 2, 16 * G)),
        operate: |scene| grow_with(scene, 4 * G, &GrowOptions::new().zeroed()),
        exception: done_already,
    },
    Row {
        operation: "grow_zeroed",
        path: "moved",
        set_up: |backend| enclosed(chunked(backend, 2, ROOM)),
        operate: |scene| grow_with(scene, ROOM + G, &GrowOptions::new().zeroed()),
        exception: |failing| behind_or_moved(failing).or_else(|| done_already(failing)),
    },
    Row {
        operation: "grow_with a chunk of another resource",
        path: "within the capacity",
        set_up: |backend| {
            let other = backend.resource_with(Options::new().own_access(Access::Read).max_chunk(G));
            let mut scene = Scene::of(chunked(backend, 2, 16 * G));
            scene.other = Some(other);
            scene
        },
        operate: |scene| {
            let other = scene.other.clone().expect("another resource");
            grow_with(scene, 4 * G, &GrowOptions::new().chunk_of(&other))
        },
        exception: none,
    },
    Row {
        operation: "grow_into",
        path: "within the capacity",
        set_up: |backend| Scene::of(chunked(backend, 2, 16 * G)),
        operate: |scene| grow_into(scene, 3 * G),
        exception: none,
    },
    Row {
        operation: "grow_into",
        path: "across the capacity",
        set_up: |backend| Scene::of(with_room_behind(&backend.resource(), G)),
        operate: |scene| grow_into(scene, ROOM + G),
        exception: behind_or_moved,
    },
    Row {
        operation: "grow_into",
        path: "moved, waiting for nothing",
        set_up: |backend| {
            let scene = enclosed(chunked(backend, 2, ROOM));
            scene.buffer().set_release(Release::Caller).unwrap();
            scene
        },
        operate: |scene| grow_into(scene, ROOM + G),
        exception: behind_or_moved,
    },
    Row {
        operation: "grow_into",
        path: "moved, waiting for a stream and a fence",
        set_up: |backend| waiting(backend, enclosed(chunked(backend, 2, ROOM))),
        operate: |scene| grow_into(scene, ROOM + G),
        exception: behind_or_moved,
    },
    Row {
        operation: "grow_into",
        path: "moved, deferring, waiting for a stream and a fence",
        set_up: |backend| waiting(backend, enclosed(deferring(backend, 2, ROOM))),
        operate: |scene| {
            let grown = grow_into(scene, ROOM + G);
            drain(scene);
            grown
        },
        exception: |failing| left_behind(failing).or_else(|| behind_or_moved(failing)),
    },
];

/// The scene with a release stream and a fence on another stream, both idle.
pub(crate) fn waiting(backend: &Backend, mut scene: Scene) -> Scene {
    let [release, other] = [(); 2].map(|()| Stream::non_blocking(&backend.device));
    scene.buffer().set_release(Release::Stream(release.clone())).unwrap();
    scene.buffer().fence(&other).unwrap();
    scene.streams.extend([release, other]);
    scene
}

/// A buffer that grows by eight granules at once.
fn by_step(backend: &Backend, capacity: usize) -> VirtualMemoryBuffer {
    let resource = backend.resource_with(Options::new().growth(GrowthPolicy::Step(8 * G)));
    resource.allocate_with_capacity(G, capacity).unwrap()
}

fn grow_with(scene: &mut Scene, size: usize, options: &GrowOptions) -> Result<Option<VirtualMemoryBuffer>, Error> {
    Ok(Some(scene.buffer().grow_with(size, options)?))
}

fn grow_anyhow(scene: &mut Scene, size: usize) -> Result<Option<VirtualMemoryBuffer>, Error> {
    Ok(Some(scene.buffer().grow(size)?))
}

fn grow(scene: &mut Scene, size: usize, outcome: Outcome) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let grown = scene.buffer().grow(size)?;
    assert_eq!(grown.outcome(), Some(outcome));
    Ok(Some(grown))
}

fn grow_into(scene: &mut Scene, size: usize) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let resized = scene.take().grow_into(size);
    settle(scene, size, resized)
}

/// Puts the buffer back that comes with an error.
pub(crate) fn settle(
    scene: &mut Scene,
    size: usize,
    resized: Result<VirtualMemoryBuffer, ResizeError>,
) -> Result<Option<VirtualMemoryBuffer>, Error> {
    resized.map(Some).map_err(|error| {
        scene.is_resized = error.is_resized();
        let (error, buffer) = error.into_parts();
        assert_eq!(buffer.size() == size, scene.is_resized);
        scene.buffer = Some(buffer);
        error.into()
    })
}

/// The first reservation is of the addresses behind: whatever it answers, it means to move. The first free is of where
/// the driver made it instead: that it stays is no reason not to move.
pub(crate) fn behind_or_moved(failing: Failing) -> Option<Verdict> {
    let is_place = matches!(failing.step.call, Call::cuMemAddressReserve | Call::cuMemAddressFree);
    (is_place && failing.step.nth == 1).then_some(Verdict::Overcome)
}

/// What lets go of the old addresses later has nobody to tell. The first free is before.
fn left_behind(failing: Failing) -> Option<Verdict> {
    let is_before = match failing.step.call {
        Call::cuMemAddressReserve | Call::cuMemCreate | Call::cuMemMap | Call::cuMemSetAccess => true,
        Call::cuMemAddressFree => failing.step.nth == 1,
        _ => false,
    };
    (!is_before).then_some(Verdict::Silent)
}

/// As [`behind_or_moved`], where as much as is wished for is tried first, and then as much as is asked for.
fn behind_twice_or_moved(failing: Failing) -> Option<Verdict> {
    let nth = failing.step.nth.saturating_sub(1).max(1);
    behind_or_moved(Failing { step: Step { nth, ..failing.step }, ..failing })
}

/// Whatever the reservation of the addresses behind answers means that the buffer would have to move.
fn behind_or_not(failing: Failing) -> Option<Verdict> {
    let would_move = Verdict::As(|error| matches!(error, cuvmm_resource::Error::WouldMove { .. }));
    (failing.step.call == Call::cuMemAddressReserve).then_some(would_move)
}

/// Where there is not so much memory, or address space, as is wished for, what is asked for is tried. Not so where it can't
/// be mapped: a mapping that was made all the same would be in the way, and hide the first error behind another.
fn less_than_wished(failing: Failing) -> Option<Verdict> {
    let takes = [Call::cuMemAddressReserve, Call::cuMemCreate, Call::cuMemSetAccess];
    (takes.contains(&failing.step.call) && failing.code == CUresult::OUT_OF_MEMORY).then_some(Verdict::Overcome)
}

/// When the thread's context and capture mode are restored the memory is zero. That they are not is counted.
pub(crate) fn done_already(failing: Failing) -> Option<Verdict> {
    let is_restored = match failing.step.call {
        Call::cuCtxPopCurrent => true,
        Call::cuThreadExchangeStreamCaptureMode => failing.step.nth.is_multiple_of(2),
        _ => false,
    };
    is_restored.then_some(Verdict::Overcome)
}
