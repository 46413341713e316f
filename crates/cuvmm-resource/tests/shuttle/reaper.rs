//! Models of what is left to the reaper: whoever drops, whenever the work ends, and whoever waits for the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUstream;
use cuvmm_handles::sync::LASTING;
use cuvmm_resource::{Error, OnDrop, Options, Release, StreamRef, VirtualMemoryBuffer};
use shuttle::thread;

use crate::driver::G;
use crate::{World, explore, on_threads};

/// A world whose buffers wait for a stream, which has work.
fn working() -> (World, StreamRef) {
    let world = World::with(Options::new().on_drop(OnDrop::Defer));
    // SAFETY: the driver of the models looks at no stream.
    let stream = unsafe {
        StreamRef::from_raw(world.resource.device().driver(), CUstream(std::ptr::without_provenance_mut(0x1000)))
    }
    .unwrap();
    world.driver.begin_work();
    (world, stream)
}

fn attend(buffers: &[VirtualMemoryBuffer], stream: &StreamRef) {
    buffers.iter().for_each(|buffer| buffer.set_release(Release::Stream(stream.clone())).unwrap());
}

/// No time passes in a model.
fn in_an_hour() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Aliases of one memory that wait for the stream.
fn busy(world: &World, stream: &StreamRef) -> [VirtualMemoryBuffer; 4] {
    let aliases = world.aliases();
    attend(&aliases, stream);
    aliases
}

/// Does something to aliases that have work, which ends at any time meanwhile. Then nothing is left of them.
fn while_work_ends(begin: impl FnOnce(&World), end: impl FnOnce([VirtualMemoryBuffer; 4])) {
    let (world, stream) = working();
    begin(&world);
    let aliases = busy(&world, &stream);
    let driver = Arc::clone(&world.driver);
    let work = thread::spawn(move || driver.end_work());
    end(aliases);
    world.resource.drain(in_an_hour()).unwrap();
    work.join().unwrap();
    assert_eq!((world.driver.left(), world.driver.events()), ([0; 3], 0));
}

#[test]
fn what_is_dropped_while_others_drop_goes_once_and_after_the_work() {
    explore(|| while_work_ends(|_| (), |aliases| drop(on_threads(aliases, drop))));
}

#[test]
fn an_alias_that_lives_keeps_what_it_shares_with_those_that_went() {
    explore(|| {
        let (world, stream) = working();
        let [first, second, third, moved] = busy(&world, &stream);
        on_threads([first, second, moved], drop);
        world.driver.end_work();
        world.resource.drain(in_an_hour()).unwrap();
        assert_eq!(world.driver.left(), [1, 3, 3]);
        drop(third);
        world.resource.drain(in_an_hour()).unwrap();
        assert_eq!((world.driver.left(), world.driver.events()), ([0; 3], 0));
    });
}

#[test]
fn several_that_drain_all_come_back_and_none_too_soon() {
    explore(|| {
        let (world, stream) = working();
        drop(busy(&world, &stream));
        assert_eq!(world.resource.drain(Instant::now()), Err(Error::StillPending { buffers: 4 }));
        let driver = Arc::clone(&world.driver);
        let work = thread::spawn(move || driver.end_work());
        on_threads([(); 2].map(|()| (world.resource.clone(), Arc::clone(&world.driver))), |(resource, driver)| {
            resource.drain(in_an_hour()).unwrap();
            assert_eq!(driver.left(), [0; 3]);
        });
        work.join().unwrap();
    });
}

#[test]
fn what_was_left_to_the_reaper_goes_also_after_its_resource() {
    explore(|| {
        let (World { driver, resource }, stream) = working();
        let buffers = [(); 2].map(|()| resource.allocate(G).unwrap());
        attend(&buffers, &stream);
        drop(resource);
        let ended = Arc::clone(&driver);
        let work = thread::spawn(move || ended.end_work());
        on_threads(buffers, drop);
        while driver.left() != [0; 3] {
            thread::yield_now();
        }
        work.join().unwrap();
    });
}

/// One that waits asks again and again, and so does the reaper: neither lets go while the other's work goes on.
#[test]
fn aliases_that_wait_and_aliases_that_do_not_go_after_the_work() {
    let end = |(index, alias): (usize, VirtualMemoryBuffer)| {
        if index % 2 == 0 {
            alias.close_within(in_an_hour()).unwrap();
        } else {
            alias.close_deferred();
        }
    };
    explore(move || while_work_ends(|_| (), |aliases| drop(on_threads(aliases.into_iter().enumerate(), end))));
}

/// Whoever waits for memory pays for no pause in which others get through: also where the pause began before, and would
/// have been for ever.
#[test]
fn pauses_between_pieces_end_where_somebody_begins_to_wait() {
    const PIECE: usize = 1 << 30;
    explore(|| {
        LASTING.set(true);
        let world = World::with(Options::new().max_chunk(PIECE));
        world.resource.allocate(3 * PIECE).unwrap().close_deferred();
        on_threads([(); 2].map(|()| world.resource.clone()), |resource| resource.drain(in_an_hour()).unwrap());
        assert_eq!(world.driver.left(), [0; 3]);
    });
}

#[test]
#[should_panic(expected = "cuMemUnmap: unmapped under work")]
fn an_event_that_is_over_before_its_work_is_found() {
    explore(|| while_work_ends(|world| world.driver.hurry(), |aliases| drop(on_threads(aliases, drop))));
}
