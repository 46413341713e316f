//! `cargo xtask ci`: what continuous integration checks, step by step; the first failure ends it.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use crate::{abort, instructions, interop, metadata, shuttle};

/// The cargo-deny that deny.toml is written for.
const CARGO_DENY: &str = "0.20.2";

type Step = (&'static str, fn(&Shell) -> Result<()>);

const STEPS: &[Step] = &[
    ("fmt", fmt),
    ("clippy", clippy),
    ("features", features),
    ("test", test),
    ("abort", abort::step),
    ("shuttle", shuttle::step),
    ("instructions", instructions::run),
    ("interop", interop::run),
    ("doc", doc),
    ("deny", deny),
];

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

/// Takes the cargo-deny that is there if it is not too old, and installs it where there is none.
fn deny(sh: &Shell) -> Result<()> {
    let installed = cmd!(sh, "cargo deny --version").quiet().ignore_stderr().read().ok();
    match installed {
        None => {
            println!("cargo-deny is not here: installing {CARGO_DENY}");
            cmd!(sh, "cargo install cargo-deny --locked --version {CARGO_DENY}").run()?;
        }
        Some(text) => println!("{}", judge_deny(&text)?),
    }
    cmd!(sh, "cargo deny --locked check bans licenses sources").run()?;
    Ok(())
}

/// What to say of an installed cargo-deny, which `cargo deny --version` describes so; an error if it is too old.
fn judge_deny(text: &str) -> Result<String> {
    let version = text.split_whitespace().last().unwrap_or_default();
    let found = numbers(version).with_context(|| format!("`cargo deny --version` says no version: {text:?}"))?;
    let install = format!("cargo install cargo-deny --locked --version {CARGO_DENY}");
    ensure!(
        Some(found) >= numbers(CARGO_DENY),
        "cargo-deny {version} is here, older than the {CARGO_DENY} that deny.toml is written for: `{install}`"
    );
    Ok(if version == CARGO_DENY {
        format!("cargo-deny {version}")
    } else {
        format!("cargo-deny {version} is here, deny.toml is written for {CARGO_DENY}: going on with it")
    })
}

/// The numbers of a version, to compare; of a pre-release those that it comes before.
fn numbers(version: &str) -> Option<[u64; 3]> {
    let release = version.split(['-', '+']).next()?;
    let numbers: Vec<u64> = release.split('.').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    numbers.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_cargo_deny_is_refused_and_a_newer_one_told() {
        let check = |text: &str, expect: Result<&str, &str>| {
            let judged = judge_deny(text).map_err(|error| error.to_string());
            match (&judged, expect) {
                (Ok(said), Ok(part)) | (Err(said), Err(part)) => assert!(said.contains(part), "{said}"),
                _ => panic!("{text}: {judged:?}"),
            }
        };
        check(&format!("cargo-deny {CARGO_DENY}"), Ok(CARGO_DENY));
        check("cargo-deny 0.21.0", Ok("cargo-deny 0.21.0 is here, deny.toml is written for"));
        check("cargo-deny 1.0.0-rc.1", Ok("going on with it"));
        check("cargo-deny 0.9.9", Err("older than"));
        check("", Err("says no version"));
    }

    /// A step that may change Cargo.lock would check another workspace than the committed one.
    #[test]
    fn every_step_takes_the_lock_file_as_it_is() {
        let source = include_str!("ci.rs");
        let (source, _) = source.split_once("#[cfg(test)]").unwrap();
        // These resolve nothing.
        let free = ["cargo fmt", "cargo deny --version"];
        let commands = source.lines().filter(|line| line.contains("cmd!(sh, \"cargo "));
        let loose: Vec<&str> = commands
            .filter(|line| !line.contains("--locked") && !free.iter().any(|command| line.contains(command)))
            .collect();
        assert_eq!(loose, [""; 0]);
    }
}
