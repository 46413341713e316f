//! `cargo xtask tidy`: the rules of the workspace, which are the tests of this package.

use anyhow::Result;
use xshell::{Shell, cmd};

pub(crate) fn run(sh: &Shell) -> Result<()> {
    cmd!(sh, "cargo test --package xtask --locked").run()?;
    Ok(())
}
