//! `cargo xtask release --dry-run`: package every published crate and build it from its package.

use anyhow::Result;
use xshell::{Shell, cmd};

pub(crate) fn dry_run(sh: &Shell) -> Result<()> {
    cmd!(sh, "cargo publish --workspace --dry-run --locked --allow-dirty").run()?;
    Ok(())
}
