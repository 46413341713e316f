//! Who waits for the work of a buffer that is dropped, or leaves its old addresses behind.

use std::time::{Duration, Instant};

use cuvmm_driver::Call;
use cuvmm_resource::{OnDrop, Options, Outcome, Release, StreamRef};

use crate::support::work::{Held, is_done};
use crate::support::{Bench, G, R};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn what_is_dropped_is_waited_for_or_left_to_another_thread() {
    assert_eq!(Options::new().on_drop, OnDrop::Wait);
    for bench in Bench::presets() {
        let stream = StreamRef::create(&bench.device()).unwrap();
        let options = |on_drop| Options::new().on_drop(on_drop).release(Release::Stream(stream.clone()));
        let waiting = bench.resource(options(OnDrop::Wait));
        let buffer = waiting.allocate(G).unwrap();
        let opening = Held::queue(stream.as_raw(), &buffer).let_go_soon();
        drop(buffer);
        assert_eq!((is_done(&stream), bench.count(Call::cuMemUnmap), waiting.pending()), (true, 1, 0));
        opening.join().unwrap();

        let deferring = bench.resource(options(OnDrop::Defer));
        let buffer = deferring.allocate(G).unwrap();
        let held = Held::queue(stream.as_raw(), &buffer);
        drop(buffer);
        assert_eq!((is_done(&stream), bench.count(Call::cuMemUnmap), deferring.pending()), (false, 1, 1));
        drop(held);
        deferring.drain(Instant::now() + PATIENCE).unwrap();
        assert_eq!((is_done(&stream), bench.count(Call::cuMemUnmap), deferring.pending()), (true, 2, 0));
        drop((waiting, deferring));
        drop(stream);
        bench.assert_clean_soon();
    }
}

#[test]
fn old_addresses_are_left_to_another_thread_and_a_close_waits_all_the_same() {
    for bench in Bench::presets() {
        let stream = StreamRef::create(&bench.device()).unwrap();
        let options = Options::new().on_drop(OnDrop::Defer).release(Release::Stream(stream.clone()));
        let resource = bench.resource(options);
        let buffer = resource.allocate_with_capacity(2 * G, R).unwrap();
        // Its alias has the addresses behind.
        let alias = buffer.grow(3 * G).unwrap();
        let held = Held::queue(stream.as_raw(), &buffer);
        let moved = buffer.grow_into(4 * G).unwrap();
        assert_eq!((moved.outcome(), resource.pending(), is_done(&stream)), (Some(Outcome::Moved), 1, false));
        let shorter = moved.truncate_into(2 * G).unwrap();
        assert_eq!((shorter.size(), resource.pending(), is_done(&stream)), (2 * G, 2, false));
        let opening = held.let_go_soon();
        alias.close().unwrap();
        assert!(bench.bytes_of(&shorter) == vec![7; 2 * G], "it did not wait");
        shorter.close().unwrap();
        opening.join().unwrap();
        resource.close(Instant::now() + PATIENCE).unwrap();
        drop(stream);
        bench.assert_clean_soon();
    }
}
