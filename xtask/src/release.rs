//! `cargo xtask release --dry-run`: package every published crate and build it from its package.

use anyhow::Result;
use xshell::{Shell, cmd};

pub(crate) fn dry_run(sh: &Shell) -> Result<()> {
    // cargo takes what it built of a version for good, also where the package has changed since: so from nothing.
    let folder = "target/release-dry-run";
    sh.remove_path(folder)?;
    cmd!(sh, "cargo publish --workspace --dry-run --locked --allow-dirty --target-dir {folder}").run()?;
    Ok(())
}
