//! Models of several that lack memory at once: who needs no more than there is gets it, whoever gives it back.

use std::time::{Duration, Instant};

use cuvmm_resource::{Options, Recycling, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use shuttle::thread;

use crate::driver::G;
use crate::{World, explore, on_threads};

/// A world with as much memory as two chunks of two are, both of which are there.
fn full(options: Options) -> (World, [VirtualMemoryBuffer; 2]) {
    let world = World::with(options);
    world.driver.limit(4 * G);
    let buffers = [(); 2].map(|()| world.resource.allocate(2 * G).unwrap());
    (world, buffers)
}

/// Several need other chunks, all of them together as much as there is.
fn allocate_all(resource: &VirtualMemoryResource) {
    let made = on_threads([2, 1, 1].map(|chunks| (resource.clone(), chunks)), |(resource, chunks)| {
        resource.allocate(chunks * G).unwrap()
    });
    drop(made);
}

#[test]
fn what_was_kept_is_enough_for_all_that_need_it_whoever_releases_it() {
    explore(|| {
        let (world, buffers) = full(Options::new().recycling(Recycling::up_to(4 * G)));
        buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
        allocate_all(&world.resource);
    });
}

#[test]
fn what_a_resource_kept_that_goes_is_enough_for_all_that_need_it() {
    explore(|| {
        let (World { driver, resource }, buffers) = full(Options::new().recycling(Recycling::up_to(4 * G)));
        let other = VirtualMemoryResource::new(resource.device(), Options::new().release(Release::Caller)).unwrap();
        buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
        let ending = thread::spawn(move || drop(resource));
        allocate_all(&other);
        ending.join().unwrap();
        while driver.left() != [0; 3] {
            thread::yield_now();
        }
    });
}

#[test]
fn what_is_pending_is_enough_for_all_that_need_it() {
    explore(|| {
        let (world, buffers) = full(Options::new());
        buffers.into_iter().for_each(VirtualMemoryBuffer::close_deferred);
        allocate_all(&world.resource);
        world.resource.drain(Instant::now() + Duration::from_secs(3600)).unwrap();
        assert_eq!(world.driver.left(), [0; 3]);
    });
}
