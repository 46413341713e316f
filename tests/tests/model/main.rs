//! Buffers against a model: whatever is done to them, in whatever order, by one thread or several at once, and whatever
//! fails, they hold the bytes that they should, at the addresses that they should, and nothing is alive that the model
//! does not know of.
//!
//! Each page of any memory is one thread's, which alone writes it and looks at it, through whichever alias. What is alive is
//! counted when nobody works.
//!
//! `CUVMM_CASES` says how many cases are tried, and `CUVMM_SEED` what they follow from; but for the order in which threads
//! come, they are the same each time. `cargo xtask soak` tries many.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod memory;
mod thread;
mod world;

use std::sync::{Arc, Barrier};

use cuvmm_tests::allow_open_files;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use crate::memory::{Modelled, Seen, Shared};
use crate::thread::{Step, Thread, steps};
use crate::world::{G, Setup, World, setup};

/// How many steps the threads of a case take, at most, together.
const STEPS: usize = 48;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Tries a part of the cases with so many threads.
fn check(threads: usize, share: u64) {
    allow_open_files();
    let cases = u32::try_from(number("CUVMM_CASES", 2000) / share).unwrap();
    let rng_seed = RngSeed::Fixed(number("CUVMM_SEED", 1));
    let config = Config { cases, rng_seed, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let seen = Arc::new(Seen::default());
    let scripts = prop::collection::vec(steps(STEPS / threads), threads);
    let outcome = TestRunner::new(config).run(&(setup(), scripts), |(setup, scripts)| {
        run(&setup, scripts, &seen);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    println!("{cases} cases of {threads} threads: {:?}", seen.counts());
    // Each way of ending comes up.
    for (what, count) in seen.counts() {
        assert!(cases < 200 || count * 10 > cases as usize, "{what}: {count} times in {cases} cases");
    }
}

fn run(setup: &Setup, scripts: Vec<Vec<Step>>, seen: &Arc<Seen>) {
    let world = World::new(setup, scripts.len(), seen);
    // What all threads use at once: one buffer with room behind it, and a smaller alias of the same memory.
    let first = world.resource.allocate_with_capacity(8 * G, 64 * G).unwrap();
    let first = Modelled::allocated(first, world.fresh);
    let places = first.head(3 * G);
    let second = Modelled { buffer: first.buffer.truncate(3 * G).unwrap(), size: 3 * G, places };
    let common = vec![first, second];
    let streams: Vec<_> = scripts.iter().map(|_| world.stream()).collect();
    let start = Barrier::new(scripts.len());
    world.begin(setup);

    let (mut own, shared): (Vec<Modelled>, Vec<Shared>) = std::thread::scope(|scope| {
        let work = |(index, (script, stream))| {
            let (world, common, start) = (&world, &common, &start);
            scope.spawn(move || {
                start.wait();
                let mut thread = Thread::new(world, index, common, stream);
                let is_alone = world.threads == 1;
                for (number, step) in Vec::into_iter(script).enumerate() {
                    thread.run(step);
                    if is_alone || number % 4 == 3 {
                        thread.check();
                    }
                    if number % 8 == 7 {
                        thread.check_all();
                    }
                    if is_alone {
                        let pot = world.pot.lock().unwrap();
                        let all: Vec<_> = thread.own.iter().chain(common).chain(&*pot).collect();
                        world.check(&all, &thread.shared.iter().collect::<Vec<_>>());
                    }
                }
                thread.check_all();
                (thread.own, thread.shared)
            })
        };
        let threads: Vec<_> = scripts.into_iter().zip(streams).enumerate().map(work).collect();
        // A panic goes on as it is, with its own message.
        let ended =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.fold(Default::default(), |mut all: (Vec<_>, Vec<_>), (own, shared)| {
            all.0.extend(own);
            all.1.extend(shared);
            all
        })
    });

    // All is over, and everybody's pages are there.
    own.extend(common);
    own.append(&mut world.pot.lock().unwrap());
    world.check(&own.iter().collect::<Vec<_>>(), &shared.iter().collect::<Vec<_>>());
    for modelled in &own {
        modelled.check(&world, |_| true);
    }
    drop(shared);
    for (number, Modelled { buffer, .. }) in own.into_iter().enumerate() {
        if number % 2 == 0 {
            drop(buffer);
        } else if let Err(error) = buffer.close() {
            world.require_excused(&error.into_parts().0.into());
        }
    }
    world.end();
}

#[test]
fn one_threads_buffers_are_as_the_model_has_them() {
    check(1, 2);
}

#[test]
fn two_threads_buffers_are_as_the_model_has_them() {
    check(2, 4);
}

#[test]
fn four_threads_buffers_are_as_the_model_has_them() {
    check(4, 4);
}
