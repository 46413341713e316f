//! `cargo xtask ci`: what continuous integration checks, step by step; the first failure ends it.

use std::time::Instant;

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use crate::metadata;

/// The cargo-deny that deny.toml is written for.
const CARGO_DENY: &str = "0.20.2";

type Step = (&'static str, fn(&Shell) -> Result<()>);

const STEPS: &[Step] =
    &[("fmt", fmt), ("clippy", clippy), ("features", features), ("test", test), ("doc", doc), ("deny", deny)];

pub(crate) fn run(sh: &Shell) -> Result<()> {
    let start = Instant::now();
    for (name, step) in STEPS {
        println!("== {name}");
        let start = Instant::now();
        step(sh).with_context(|| format!("step `{name}` failed"))?;
        println!("== {name}: ok, {:.1} s", start.elapsed().as_secs_f64());
    }
    println!("== all {} steps ok, {:.1} s", STEPS.len(), start.elapsed().as_secs_f64());
    Ok(())
}

fn fmt(sh: &Shell) -> Result<()> {
    cmd!(sh, "cargo fmt --all --check").run()?;
    Ok(())
}

fn clippy(sh: &Shell) -> Result<()> {
    cmd!(sh, "cargo clippy --workspace --all-targets --locked -- -D warnings").run()?;
    Ok(())
}

/// Each package that declares features, without any and with all of them; the other steps build
/// the default ones.
fn features(sh: &Shell) -> Result<()> {
    for package in metadata::packages_with_features(sh)? {
        for set in ["--no-default-features", "--all-features"] {
            cmd!(sh, "cargo clippy --package {package} {set} --locked -- -D warnings").run()?;
        }
    }
    Ok(())
}

/// Unit, integration and doc tests, the rules of the workspace (the tests of xtask) among them.
fn test(sh: &Shell) -> Result<()> {
    cmd!(sh, "cargo test --workspace --locked").run()?;
    Ok(())
}

fn doc(sh: &Shell) -> Result<()> {
    cmd!(sh, "cargo doc --workspace --no-deps --locked").env("RUSTDOCFLAGS", "-D warnings").run()?;
    Ok(())
}

fn deny(sh: &Shell) -> Result<()> {
    let installed = cmd!(sh, "cargo deny --version").quiet().ignore_stderr().read().is_ok();
    if !installed {
        cmd!(sh, "cargo install cargo-deny --locked --version {CARGO_DENY}").run()?;
    }
    cmd!(sh, "cargo deny --locked check bans licenses sources").run()?;
    Ok(())
}
