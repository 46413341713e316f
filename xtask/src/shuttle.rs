//! `cargo xtask shuttle`: run the models of what threads share, each in many orders of its threads' steps.

use std::env;

use anyhow::Result;
use xshell::{Shell, cmd};

/// A build with `--cfg shuttle` has another `Arc` and `Mutex`, so that nothing of it serves any other.
const FOLDER: &str = "target/shuttle";

/// Runs them as they stand: what the tests themselves say of the number of orders and the seed.
pub(crate) fn step(sh: &Shell) -> Result<()> {
    run(sh, None, None)
}

pub(crate) fn run(sh: &Shell, schedules: Option<u64>, seed: Option<u64>) -> Result<()> {
    let flags = env::var("RUSTFLAGS").unwrap_or_default();
    let mut command = cmd!(sh, "cargo test --locked --package cuvmm-resource --test shuttle --target-dir {FOLDER}")
        .env("RUSTFLAGS", format!("{flags} --cfg shuttle"));
    for (name, number) in [("CUVMM_SCHEDULES", schedules), ("CUVMM_SEED", seed)] {
        if let Some(number) = number {
            command = command.env(name, number.to_string());
        }
    }
    command.run()?;
    Ok(())
}
