//! `cargo xtask soak`: random calls on the simulated driver, many more than the tests make, with several seeds.

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

/// How many calls each machine of the test gets.
const CALLS: u64 = 1_000_000;
const SEEDS: u64 = 3;

/// Runs the test with each seed; the first failure ends it, and the line before it says which seed that was.
pub(crate) fn run(sh: &Shell, calls: Option<u64>, first: Option<u64>, seeds: Option<u64>) -> Result<()> {
    let (calls, first) = (calls.unwrap_or(CALLS).to_string(), first.unwrap_or(1));
    for seed in first..first.saturating_add(seeds.unwrap_or(SEEDS)) {
        let number = seed.to_string();
        println!("== seed {seed}: CUVMM_SEED={seed} CUVMM_CALLS={calls}");
        cmd!(sh, "cargo test --release --locked --package cuvmm-sim --test anything -- --nocapture")
            .env("CUVMM_SEED", &number)
            .env("CUVMM_CALLS", &calls)
            .run()
            .with_context(|| format!("seed {seed} failed"))?;
    }
    Ok(())
}
