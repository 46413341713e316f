//! Models of what threads keep for each other: a chunk is kept once, taken once, and goes once.

use cuvmm_resource::{Options, Recycling, VirtualMemoryBuffer};
use shuttle::thread;

use crate::driver::G;
use crate::{World, explore, on_threads};

fn keeping(bytes: usize) -> World {
    World::with(Options::new().recycling(Recycling::up_to(bytes)))
}

/// Demands that what is left is what is kept, and that trimming ends that.
fn require_kept(world: &World, bytes: usize) {
    let [reserved, memory, mapped] = world.driver.left();
    let statistics = world.resource.statistics();
    assert_eq!((reserved, mapped, statistics.kept.now, statistics.physical.now), (0, 0, bytes, bytes));
    assert_eq!((world.resource.trim(0), memory > 0), (Ok(bytes), bytes > 0));
    assert_eq!(world.driver.left(), [0; 3]);
}

#[test]
fn aliases_that_go_in_any_order_leave_each_chunk_once() {
    explore(|| {
        let world = keeping(8 * G);
        let end = |(index, alias): (usize, VirtualMemoryBuffer)| {
            if index % 2 == 0 { alias.close().unwrap() } else { drop(alias) }
        };
        on_threads(world.aliases().into_iter().enumerate(), end);
        // Three of the range, and what the one that moved added.
        require_kept(&world, 4 * G);
    });
}

#[test]
fn what_several_close_and_take_is_nobodys_twice_and_within_the_budget() {
    explore(|| {
        let world = keeping(2 * G);
        on_threads([(); 3].map(|()| world.resource.clone()), |resource| {
            for _ in 0..2 {
                resource.allocate(G).unwrap().close().unwrap();
            }
            let [one, other] = [(); 2].map(|()| resource.allocate(G).unwrap());
            drop((one, other));
        });
        let statistics = world.resource.statistics();
        assert!(statistics.kept.peak <= 2 * G, "{statistics:?}");
        require_kept(&world, 2 * G);
    });
}

#[test]
fn trimming_and_closing_at_once_lose_nothing() {
    explore(|| {
        let world = keeping(4 * G);
        let resource = world.resource.clone();
        let trimming = thread::spawn(move || resource.trim(0).unwrap());
        on_threads([(); 2].map(|()| world.resource.clone()), |resource| {
            resource.allocate(G).unwrap().close().unwrap();
        });
        let trimmed = trimming.join().unwrap();
        let statistics = world.resource.statistics();
        assert_eq!((statistics.trimmed * G, statistics.physical.now), (trimmed, statistics.kept.now));
        require_kept(&world, statistics.kept.now);
    });
}

#[test]
fn what_closes_while_its_resource_goes_is_not_kept_for_nobody() {
    explore(|| {
        let World { driver, resource } = keeping(4 * G);
        resource.allocate(2 * G).unwrap().close().unwrap();
        let buffers = [(); 2].map(|()| resource.allocate(G).unwrap());
        drop(resource);
        on_threads(buffers, |buffer| buffer.close().unwrap());
        while driver.left() != [0; 3] {
            thread::yield_now();
        }
    });
}
