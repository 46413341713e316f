//! `cargo xtask fuzz`: try what the fuzzer makes up on what reads and receives buffer descriptors.
//!
//! ```text
//! target/fuzz/corpus/TARGET     what led somewhere new, kept for the next time
//! target/fuzz/artifacts/TARGET  what failed: `cargo xtask fuzz --again FILE TARGET` tries it once more
//! ```

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use xshell::{Shell, cmd};

use crate::flags;

const CARGO_FUZZ: &str = "0.13.2";
/// The targets of the folder `fuzz`.
const TARGETS: [&str; 3] = ["wire", "receive", "send"];
const FOLDER: &str = "target/fuzz";
/// How many inputs each target gets.
const RUNS: u64 = 1_000_000;
/// What the fuzzer says in the end, before the count of its inputs.
const EXECUTED: &str = "stat::number_of_executed_units:";
/// Inputs are short, memory is bounded, and none takes long.
const BOUNDS: [&str; 3] = ["-max_len=512", "-rss_limit_mb=1024", "-timeout=60"];

/// Tries each target, or the one that is named, and prints how many inputs each had.
pub(crate) fn run(sh: &Shell, options: &flags::Fuzz) -> Result<()> {
    let targets: Vec<&str> = match &options.target {
        None => TARGETS.to_vec(),
        Some(named) => TARGETS.into_iter().filter(|target| target == named).collect(),
    };
    ensure!(!targets.is_empty(), "no such target: there are {}", TARGETS.join(", "));
    install(sh)?;
    let mut tried = Vec::new();
    for target in targets {
        println!("== {target}");
        let corpus = sh.create_dir(Path::new(FOLDER).join("corpus").join(target))?;
        let artifacts = sh.create_dir(Path::new(FOLDER).join("artifacts").join(target))?;
        let prefix = format!("-artifact_prefix={}/", artifacts.display());
        let (input, runs) = match &options.again {
            Some(file) => (file, 1),
            None => (&corpus, options.runs.unwrap_or(RUNS)),
        };
        let mut fuzzer = Command::new("cargo");
        // Coverage alone, which a stable toolchain has; a sanitizer is a nightly one's.
        fuzzer.args(["fuzz", "run", "--fuzz-dir", "fuzz", "--target-dir", FOLDER, "--sanitizer", "none", target]);
        fuzzer.arg(input).arg("--").arg(prefix).args(BOUNDS);
        fuzzer.arg(format!("-runs={runs}")).arg("-print_final_stats=1");
        tried.push((target, count(fuzzer).with_context(|| format!("{target} failed"))?));
    }
    for (target, executed) in &tried {
        println!("{target}: {executed} inputs, no failure");
    }
    Ok(())
}

fn install(sh: &Shell) -> Result<()> {
    if cmd!(sh, "cargo fuzz --version").quiet().ignore_stdout().ignore_stderr().run().is_err() {
        println!("cargo-fuzz is not here: installing {CARGO_FUZZ}");
        cmd!(sh, "cargo install cargo-fuzz --locked --version {CARGO_FUZZ}").run()?;
    }
    Ok(())
}

/// Runs the fuzzer, passes on what it says, and gives the number of inputs that it tried.
fn count(mut fuzzer: Command) -> Result<u64> {
    let mut process = fuzzer.stderr(Stdio::piped()).spawn().context("cargo cannot be started")?;
    let mut executed = None;
    for line in BufReader::new(process.stderr.take().context("its errors are piped")?).lines() {
        let line = line?;
        eprintln!("{line}");
        executed = executed_in(&line).or(executed);
    }
    let status = process.wait()?;
    ensure!(status.success(), "the fuzzer found something, or could not be built: {status}");
    match executed {
        Some(executed) => Ok(executed),
        None => bail!("the fuzzer does not say how many inputs it tried"),
    }
}

fn executed_in(line: &str) -> Option<u64> {
    line.strip_prefix(EXECUTED)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found() {
        assert_eq!(executed_in("stat::number_of_executed_units: 200000"), Some(200_000));
        assert_eq!(executed_in("stat::average_exec_per_sec:     0"), None);
    }

    #[test]
    fn every_target_is_tried() {
        let manifest = include_str!("../../fuzz/Cargo.toml");
        let names =
            manifest.split("[[bin]]").skip(1).filter_map(|bin| bin.trim().strip_prefix("name = \"")?.split('"').next());
        assert_eq!(names.collect::<Vec<_>>(), TARGETS);
    }
}
