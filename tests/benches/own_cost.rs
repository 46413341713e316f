//! What the layers themselves cost: allocate, grow and close on a driver whose calls do nothing.
#![allow(missing_docs, reason = "the functions are criterion's")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at what it did not expect")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use cuvmm::{Driver, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{G, Nothing};

/// How many chunks a buffer has that grows.
const CHUNKS: [usize; 3] = [1, 100, 10_000];

fn resource(driver: Nothing) -> VirtualMemoryResource {
    let device = Driver::new(driver).unwrap().device(0).unwrap();
    VirtualMemoryResource::new(&device, Options::new().release(Release::Caller)).unwrap()
}

/// A buffer of that many chunks, with room for as many and some more.
fn chain(resource: &VirtualMemoryResource, chunks: usize) -> VirtualMemoryBuffer {
    let mut buffer = resource.allocate_with_capacity(G, (chunks + 1) * G).unwrap();
    for chunk in 2..=chunks {
        buffer = buffer.grow_into(chunk * G).unwrap();
    }
    buffer
}

/// A way to grow.
struct Case {
    name: &'static str,
    driver: fn() -> Nothing,
    /// The size to grow to, of a buffer.
    size: fn(&VirtualMemoryBuffer) -> usize,
    outcome: Outcome,
}

const CASES: [Case; 4] = [
    // The first two in its reservation and behind it, the last beyond what no driver grants.
    Case {
        name: "grow-in-place",
        driver: Nothing::granting,
        size: |buffer| buffer.size() + G,
        outcome: Outcome::InPlace,
    },
    Case {
        name: "grow-behind",
        driver: Nothing::granting,
        size: |buffer| buffer.capacity() + G,
        outcome: Outcome::InPlace,
    },
    Case { name: "covered", driver: Nothing::granting, size: VirtualMemoryBuffer::size, outcome: Outcome::Covered },
    Case {
        name: "grow-move",
        driver: Nothing::elsewhere,
        size: |buffer| buffer.capacity() + G,
        outcome: Outcome::Moved,
    },
];

fn own_cost(criterion: &mut Criterion) {
    criterion.bench_function("own/allocate-close", |bencher| {
        let resource = resource(Nothing::granting());
        bencher.iter(|| resource.allocate(black_box(G)).unwrap().close().unwrap());
    });
    for Case { name, driver, size, outcome } in CASES {
        for chunks in CHUNKS {
            let resource = resource(driver());
            let buffer = chain(&resource, chunks);
            let size = size(&buffer);
            let grow = || {
                let grown = buffer.grow(black_box(size)).unwrap();
                assert_eq!(grown.outcome(), Some(outcome));
                grown
            };
            // With the cost of reading the clock twice.
            criterion.bench_function(&format!("own/{name}/{chunks}"), |bencher| {
                bencher.iter_custom(|times| {
                    let mut sum = Duration::ZERO;
                    for _ in 0..times {
                        let start = Instant::now();
                        let grown = grow();
                        sum += start.elapsed();
                        grown.close().unwrap();
                    }
                    sum
                });
            });
            criterion.bench_function(&format!("own/{name}-close/{chunks}"), |bencher| {
                bencher.iter(|| grow().close().unwrap());
            });
        }
    }
}

criterion_group!(benches, own_cost);
criterion_main!(benches);
