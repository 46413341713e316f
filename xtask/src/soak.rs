//! `cargo xtask soak`: random calls on the simulated driver, and random cases of buffers against their model, many more than
//! the tests make, with several seeds.

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use crate::flags;

/// How many calls each machine of the test of the simulator gets.
const CALLS: u64 = 1_000_000;
/// How many cases the test of buffers gets: with all seeds more than 100,000.
const CASES: u64 = 35_000;
const SEEDS: u64 = 3;

/// Runs the tests with each seed; the first failure ends it, and the line before it says which seed that was.
pub(crate) fn run(sh: &Shell, options: &flags::Soak) -> Result<()> {
    let (calls, cases) = (options.calls.unwrap_or(CALLS), options.cases.unwrap_or(CASES));
    let first = options.seed.unwrap_or(1);
    for seed in first..first.saturating_add(options.seeds.unwrap_or(SEEDS)) {
        test(sh, seed, ("cuvmm-sim", "anything"), ("CUVMM_CALLS", calls))?;
        test(sh, seed, ("cuvmm-tests", "model"), ("CUVMM_CASES", cases))?;
    }
    Ok(())
}

/// Runs one test of a package with a seed; none where it is to do nothing.
fn test(sh: &Shell, seed: u64, (package, test): (&str, &str), (name, many): (&str, u64)) -> Result<()> {
    if many == 0 {
        return Ok(());
    }
    println!("== seed {seed}: CUVMM_SEED={seed} {name}={many}");
    cmd!(sh, "cargo test --release --locked --package {package} --test {test} -- --nocapture")
        .env("CUVMM_SEED", seed.to_string())
        .env(name, many.to_string())
        .run()
        .with_context(|| format!("{test} failed with seed {seed}"))
}
