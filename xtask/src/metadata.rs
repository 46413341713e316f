//! What `cargo metadata` says of the packages of the workspace.

use anyhow::{Context, Result};
use serde_json::Value;
use xshell::{Shell, cmd};

/// The names of the packages that declare cargo features.
pub(crate) fn packages_with_features(sh: &Shell) -> Result<Vec<String>> {
    let text = cmd!(sh, "cargo metadata --format-version 1 --no-deps --locked").quiet().read()?;
    let metadata: Value = serde_json::from_str(&text).context("cargo metadata is not JSON")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let declares = |package: &&Value| package["features"].as_object().is_some_and(|features| !features.is_empty());
    Ok(packages.iter().filter(declares).filter_map(|package| package["name"].as_str().map(str::to_owned)).collect())
}
