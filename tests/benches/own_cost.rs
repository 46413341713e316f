//! What the layers themselves cost on a driver whose calls do nothing, by the number of chunks; with the cost of reading the
//! clock twice.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the functions are criterion's")]

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use cuvmm_tests::{OPERATIONS, allow_open_files};

const CHUNKS: [usize; 5] = [1, 10, 100, 1000, 10_000];

fn own_cost(criterion: &mut Criterion) {
    // Each chunk that is exported is one.
    allow_open_files();
    for (name, prepare) in OPERATIONS {
        for chunks in CHUNKS {
            criterion.bench_function(&format!("own/{name}/{chunks}"), |bencher| {
                let mut repeat = prepare(chunks);
                bencher.iter_custom(|times| {
                    let mut sum = Duration::ZERO;
                    for _ in 0..times {
                        repeat(&mut |operation| {
                            let start = Instant::now();
                            operation();
                            sum += start.elapsed();
                        });
                    }
                    sum
                });
            });
        }
    }
}

fn short() -> Criterion {
    Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1))
}

criterion_group! { name = benches; config = short(); targets = own_cost }
criterion_main!(benches);
