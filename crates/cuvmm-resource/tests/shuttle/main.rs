//! Models of what threads share: the room at a range's end, and the last owner of each thing, in many orders of the
//! threads' steps. `cargo xtask shuttle` builds and runs them; any other build has none.
//!
//! `CUVMM_SCHEDULES` says how many orders each model is run in, and `CUVMM_SEED` what they follow from.
#![cfg(cuvmm_shuttle)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod driver;
mod reaper;
mod recycling;
mod shortage;

use std::cell::Cell;
use std::sync::Arc;

use cuvmm_driver::{Call, Driver};
use cuvmm_handles::sync::{LOCKED, TORN};
use cuvmm_resource::{OnDrop, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use shuttle::Runner;
use shuttle::scheduler::{PctScheduler, RandomScheduler, RoundRobinScheduler};
use shuttle::thread;

use crate::driver::{Checking, G, REFUSAL};

/// The orders that a model is run in, by each of two schedulers.
const SCHEDULES: usize = 500;
const SEED: u64 = 1;
/// How many times the second of them has a thread overtaken.
const DEPTH: usize = 3;

/// Runs a model in many orders of its threads' steps.
fn explore(model: impl Fn() + Copy + Send + Sync + 'static) {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seed = number("CUVMM_SEED").unwrap_or(SEED);
    let schedules = number("CUVMM_SCHEDULES").map_or(SCHEDULES, |number| usize::try_from(number).unwrap());
    Runner::new(RandomScheduler::new_from_seed(seed, schedules), shuttle::Config::default()).run(model);
    Runner::new(PctScheduler::new_from_seed(seed, DEPTH, schedules), shuttle::Config::default()).run(model);
}

struct World {
    driver: Arc<Checking>,
    resource: VirtualMemoryResource,
}

impl World {
    fn new() -> Self {
        Self::with(Options::new())
    }

    fn with(options: Options) -> Self {
        let driver = Arc::new(Checking::default());
        let device = Driver::new(Arc::clone(&driver)).unwrap().device(0).unwrap();
        let resource = VirtualMemoryResource::new(&device, options.release(Release::Caller)).unwrap();
        Self { driver, resource }
    }

    fn buffer(&self, size: usize, capacity: usize) -> Arc<VirtualMemoryBuffer> {
        Arc::new(self.resource.allocate_with_capacity(size, capacity).unwrap())
    }

    /// Aliases of one memory: three of one range, ever longer, and one of the first's memory elsewhere.
    fn aliases(&self) -> [VirtualMemoryBuffer; 4] {
        let first = self.resource.allocate_with_capacity(G, 3 * G).unwrap();
        let second = first.grow(2 * G).unwrap();
        let third = second.grow(3 * G).unwrap();
        let moved = first.grow(2 * G).unwrap();
        let outcomes = [&second, &third, &moved].map(VirtualMemoryBuffer::outcome);
        assert_eq!(outcomes, [Outcome::InPlace, Outcome::InPlace, Outcome::Moved].map(Some));
        [first, second, third, moved]
    }
}

/// What each of several threads makes of its part.
fn on_threads<P: Send + 'static, R: Send + 'static>(
    parts: impl IntoIterator<Item = P>,
    work: impl Fn(P) -> R + Copy + Send + 'static,
) -> Vec<R> {
    let threads: Vec<_> = parts.into_iter().map(|part| thread::spawn(move || work(part))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Several threads grow one buffer at once: one gets the addresses behind it. When it closes they can be had again.
fn race_for_the_room(capacity: usize) {
    let world = World::new();
    let buffer = world.buffer(G, capacity);
    let shares = [(); 3].map(|()| Arc::clone(&buffer));
    let grown = on_threads(shares, |buffer| buffer.grow(2 * G).unwrap());
    let in_place = grown.iter().filter(|grown| grown.outcome() == Some(Outcome::InPlace)).count();
    let moved = grown.iter().filter(|grown| grown.outcome() == Some(Outcome::Moved)).count();
    assert_eq!((in_place, moved), (1, 2));

    on_threads(grown, |grown| grown.close().unwrap());
    let again = buffer.grow(2 * G).unwrap();
    assert_eq!(again.outcome(), Some(Outcome::InPlace));
    drop((buffer, again));
    assert_eq!(world.driver.left(), [0; 3]);
}

#[test]
fn one_of_several_grows_gets_the_room_in_the_reservation() {
    explore(|| race_for_the_room(2 * G));
}

#[test]
fn one_of_several_grows_gets_the_addresses_behind_the_reservation() {
    explore(|| race_for_the_room(G));
}

/// Aliases grow and close on several threads, so that one grows where another closes.
fn grow_where_others_close(world: &World) {
    let buffer = world.buffer(G, 2 * G);
    let shares = [(); 3].map(|()| Arc::clone(&buffer));
    on_threads(shares, |buffer| {
        for _ in 0..2 {
            buffer.grow(2 * G).unwrap().close().unwrap();
        }
    });
    drop(buffer);
    assert_eq!(world.driver.left(), [0; 3]);
}

#[test]
fn nothing_is_mapped_where_another_alias_is_not_yet_unmapped() {
    explore(|| grow_where_others_close(&World::new()));
}

#[test]
#[should_panic(expected = "cuMemMap: two mappings overlap")]
fn an_unmap_that_comes_after_the_room_is_given_back_is_found() {
    explore(|| {
        let world = World::new();
        world.driver.unmap_late();
        grow_where_others_close(&world);
    });
}

#[test]
fn what_is_cut_off_is_room_for_others() {
    explore(|| {
        let world = World::with(Options::new().max_chunk(G));
        let buffer = world.buffer(G, 3 * G);
        let shares = [(); 3].map(|()| Arc::clone(&buffer));
        on_threads(shares, |buffer| {
            let cut = buffer.grow(3 * G).unwrap().truncate_into(2 * G).unwrap();
            cut.grow(3 * G).unwrap().close().unwrap();
            cut.truncate_into(G).unwrap().grow_into(2 * G).unwrap().close().unwrap();
        });
        drop(buffer);
        assert_eq!(world.driver.left(), [0; 3]);
    });
}

#[test]
fn a_grow_refused_halfway_leaves_nothing_behind() {
    explore(|| {
        let world = World::with(Options::new().max_chunk(G));
        let buffer = world.buffer(G, 3 * G);
        // The fourth of the six chunks.
        world.driver.refuse(Call::cuMemMap, 3);
        let shares = [(); 3].map(|()| Arc::clone(&buffer));
        let grown = on_threads(shares, |buffer| buffer.grow(3 * G).map_err(|error| error.code()));
        let refused: Vec<_> = grown.iter().filter_map(|grown| grown.as_ref().err()).collect();
        assert_eq!(refused, [&Some(REFUSAL)]);
        drop((buffer, grown));
        assert_eq!(world.driver.left(), [0; 3]);
    });
}

#[test]
fn aliases_closed_and_dropped_in_any_order_give_everything_back_once() {
    explore(|| {
        let world = World::new();
        let parts = world.aliases().into_iter().enumerate();
        on_threads(parts, |(index, alias)| if index % 2 == 0 { alias.close().unwrap() } else { drop(alias) });
        assert_eq!(world.driver.left(), [0; 3]);
    });
}

#[test]
fn an_alias_that_grows_while_the_others_go_keeps_what_it_shares() {
    explore(|| {
        let world = World::new();
        let parts = world.aliases().into_iter().enumerate();
        let grown = on_threads(parts, |(index, alias)| if index == 0 { alias.grow_into(3 * G).ok() } else { None });
        let grown = grown.into_iter().flatten().next().unwrap();
        assert_eq!(grown.chunks().iter().map(|chunk| chunk.size).sum::<usize>(), 3 * G);
        let [reserved, memory, mapped] = world.driver.left();
        assert_eq!((memory, mapped), (grown.chunks().len(), grown.chunks().len()));
        assert_eq!(reserved, 1);
        grown.close().unwrap();
        assert_eq!(world.driver.left(), [0; 3]);
    });
}

/// Aliases close on a thread each, and one call is refused: one of them is told, whichever comes last.
fn close_with_a_refusal(call: Call, before: usize) {
    let world = World::new();
    let aliases = world.aliases();
    world.driver.refuse(call, before);
    let closed = on_threads(aliases, VirtualMemoryBuffer::close);
    let told: Vec<_> = closed.into_iter().filter_map(Result::err).map(|error| error.error().code()).collect();
    assert_eq!(told, [Some(REFUSAL)], "who was told of a refused {call}");
    let left = match call {
        Call::cuMemAddressFree => [1, 0, 0],
        Call::cuMemRelease => [0, 1, 0],
        _ => [1, 0, 1],
    };
    assert_eq!(world.driver.left(), left);
}

#[test]
fn a_refused_unmap_is_told_once() {
    explore(|| close_with_a_refusal(Call::cuMemUnmap, 0));
    explore(|| close_with_a_refusal(Call::cuMemUnmap, 4));
}

#[test]
fn a_refused_release_is_told_once() {
    explore(|| close_with_a_refusal(Call::cuMemRelease, 0));
    explore(|| close_with_a_refusal(Call::cuMemRelease, 3));
}

#[test]
fn a_refused_free_is_told_once() {
    explore(|| close_with_a_refusal(Call::cuMemAddressFree, 0));
    explore(|| close_with_a_refusal(Call::cuMemAddressFree, 1));
}

#[test]
#[should_panic(expected = "who was told of a refused cuMemRelease")]
fn a_last_owner_that_is_lost_is_found() {
    explore(|| {
        TORN.set(true);
        close_with_a_refusal(Call::cuMemRelease, 3);
    });
}

/// What each operation locks, as the README says, which the suite `own_counts` holds otherwise.
#[test]
fn operations_take_as_many_locks_as_the_readme_says() {
    const README: &str = include_str!("../../README.md");
    fn check<R>(row: &str, operation: impl FnOnce() -> R) -> R {
        let before = LOCKED.with(Cell::get);
        let result = operation();
        let taken = LOCKED.with(Cell::get) - before;
        let row = README.lines().find(|line| line.starts_with(&format!("| {row} |"))).unwrap();
        let stated = row.split('|').filter_map(|cell| cell.trim().parse::<usize>().ok()).next_back();
        assert_eq!(stated, Some(taken), "{row}");
        result
    }
    Runner::new(RoundRobinScheduler::new(1), shuttle::Config::default()).run(|| {
        let world = World::new();
        let buffer = check("`allocate`", || world.resource.allocate(G).unwrap());
        let behind = check("`grow`, in place, by a reservation behind", || buffer.grow(2 * G).unwrap());
        assert_eq!(behind.outcome(), Some(Outcome::InPlace));
        let alias = check("`grow`, covered", || behind.grow(G).unwrap());
        check("`close`, beside an alias", || alias.close().unwrap());
        drop(behind);
        check("`close`, the last of its memory", || buffer.close().unwrap());
        let one = || world.resource.allocate(G).unwrap();
        let (dropped, deferred) = (one(), one());
        check("`drop`, the last of its memory", || drop(dropped));
        check("`close_deferred`", || deferred.close_deferred());
        let deferring = World::with(Options::new().on_drop(OnDrop::Defer));
        let dropped = deferring.resource.allocate(G).unwrap();
        check("`drop`, deferred", || drop(dropped));

        let mut buffer = world.resource.allocate_with_capacity(G, 10 * G).unwrap();
        buffer = check("`grow`, in place", || buffer.grow(2 * G).unwrap());
        for chunk in 3..=10 {
            buffer = buffer.grow_into(chunk * G).unwrap();
        }
        let _taken = buffer.grow(11 * G).unwrap();
        let moved = check("`grow`, moved, of 10 chunks", || buffer.grow(11 * G).unwrap());
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
    });
}
