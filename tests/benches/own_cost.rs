//! What the layers themselves cost on a driver whose calls do nothing, by the number of chunks; with the cost of reading the
//! clock twice.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the functions are criterion's")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at what it did not expect")]

use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{env, fs};

use criterion::{Criterion, criterion_group};
use cuvmm_tests::{OPERATIONS, allow_open_files, processors};

/// Where criterion leaves what it measured, if that is said.
const FOLDER: &str = "CRITERION_HOME";

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

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
    if let Some(folder) = env::var_os(FOLDER).map(PathBuf::from).filter(|folder| folder.is_dir()) {
        // Beside the figures, which mean little without.
        fs::write(folder.join("machine"), processors()).unwrap();
    }
}
