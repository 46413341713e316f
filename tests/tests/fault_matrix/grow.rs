//! Growing.

use cuvmm::{Call, Error, Outcome, Release, VirtualMemoryBuffer};
use cuvmm_tests::matrix::{Failing, Row, Scene, Verdict, none};
use cuvmm_tests::{Backend, G, ROOM, Stream, occupy_behind, with_room_behind};

use crate::chunked;

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
];

/// The buffer with the addresses behind it occupied.
fn enclosed(buffer: VirtualMemoryBuffer) -> Scene {
    let mut scene = Scene::of(buffer);
    scene.occupied = occupy_behind(scene.buffer());
    scene
}

/// The scene with a release stream and a fence on another stream, both idle.
pub(crate) fn waiting(backend: &Backend, mut scene: Scene) -> Scene {
    let [release, other] = [(); 2].map(|()| Stream::non_blocking(&backend.device));
    scene.buffer().set_release(Release::Stream(release.clone())).unwrap();
    scene.buffer().fence(&other).unwrap();
    scene.streams.extend([release, other]);
    scene
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
    match scene.take().grow_into(size) {
        Ok(grown) => Ok(Some(grown)),
        Err(error) => {
            scene.is_grown = error.is_resized();
            let (error, buffer) = error.into_parts();
            assert_eq!(buffer.size() == size, scene.is_grown);
            scene.buffer = Some(buffer);
            Err(error.into())
        }
    }
}

/// The first reservation is of the addresses behind: whatever it answers, it means to move. The first free is of where
/// the driver made it instead: that it stays is no reason not to move.
fn behind_or_moved(failing: Failing) -> Option<Verdict> {
    let is_place = matches!(failing.step.call, Call::cuMemAddressReserve | Call::cuMemAddressFree);
    (is_place && failing.step.nth == 1).then_some(Verdict::Overcome)
}
