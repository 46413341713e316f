//! `cargo xtask shuttle`: run the models of what threads share, each in many orders of its threads' steps.

use std::env;

use anyhow::Result;
use xshell::{Shell, cmd};

/// What chooses them, with what the models and all below them are built of. The rest of the workspace is not to be built so.
const CFG: &str = "--cfg cuvmm_shuttle";
/// A build with that has another `Arc` and `Mutex`, so that nothing of it serves any other.
const FOLDER: &str = "target/shuttle";

/// Lints them, which no other build compiles, and runs them as they stand: what the tests themselves say of the number of
/// orders and the seed.
pub(crate) fn step(sh: &Shell) -> Result<()> {
    let packages = ["--package", "cuvmm-handles", "--package", "cuvmm-resource", "--lib", "--test", "shuttle"];
    cmd!(sh, "cargo clippy --locked {packages...} --target-dir {FOLDER} -- -D warnings")
        .env("RUSTFLAGS", flags())
        .run()?;
    run(sh, None, None)
}

pub(crate) fn run(sh: &Shell, schedules: Option<u64>, seed: Option<u64>) -> Result<()> {
    let mut command = cmd!(sh, "cargo test --locked --package cuvmm-resource --test shuttle --target-dir {FOLDER}")
        .env("RUSTFLAGS", flags());
    for (name, number) in [("CUVMM_SCHEDULES", schedules), ("CUVMM_SEED", seed)] {
        if let Some(number) = number {
            command = command.env(name, number.to_string());
        }
    }
    command.run()?;
    Ok(())
}

/// Those that are given, and the one for the models.
fn flags() -> String {
    format!("{} {CFG}", env::var("RUSTFLAGS").unwrap_or_default())
}
