//! `cargo xtask gpu-test`: build the suites that need a GPU and run them, or bundle them.
//!
//! The suites are the integration tests of `cuvmm-tests`; its binary `gpu-test` runs them.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::bundle;

/// A benchmark that needs no GPU, but a machine that does nothing else: one with a GPU is likely to be such.
const OWN_COST: &str = "own_cost";

/// Everything that a GPU machine needs, as paths below the target folder.
pub(crate) struct Binaries {
    pub(crate) runner: PathBuf,
    pub(crate) cli: PathBuf,
    pub(crate) process_life: PathBuf,
    pub(crate) share_with: PathBuf,
    pub(crate) suites: Vec<Artifact>,
    pub(crate) examples: Vec<Artifact>,
    pub(crate) benches: Vec<Artifact>,
}

/// One executable that cargo built.
#[derive(Debug, PartialEq)]
pub(crate) struct Artifact {
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// The file of its `main`.
    pub(crate) source: PathBuf,
}

/// Runs the suites on this machine, which leave their reports in `report`. The exit code is the runner's.
pub(crate) fn run_here(sh: &Shell, report: Option<&Path>) -> Result<ExitCode> {
    let binaries = build(sh)?;
    let report = report.map(|dir| [Path::new("--report"), dir]);
    let status = Command::new(&binaries.runner)
        .args(report.into_iter().flatten())
        .args(binaries.suites.iter().map(|suite| suite.path.as_path()).chain([binaries.share_with.as_path()]))
        .status()
        .with_context(|| format!("failed to start {}", binaries.runner.display()))?;
    // A runner that a signal ended has no code.
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Leaves the suites and their runner in `dir`.
pub(crate) fn write_bundle(sh: &Shell, dir: &Path) -> Result<()> {
    bundle::check_target(dir)?;
    let binaries = build(sh)?;
    let bundle = bundle::write(sh, dir, &binaries)?;
    println!(
        "{}: {} suites, {} examples, {} benchmarks, {}, for glibc {} or newer; run ./gpu-test in it; {} packed, in {}",
        dir.display(),
        bundle.suites,
        binaries.examples.len(),
        binaries.benches.len(),
        bundle::mebibytes(bundle.bytes),
        bundle.glibc,
        bundle::mebibytes(bundle.packed),
        bundle::archive(dir).display(),
    );
    Ok(())
}

fn build(sh: &Shell) -> Result<Binaries> {
    let json = ["--release", "--locked", "--message-format=json-render-diagnostics"];
    let tests = cmd!(sh, "cargo test --package cuvmm-tests --test * --bench * --no-run {json...}").read()?;
    let programs = cmd!(sh, "cargo build --workspace --exclude xtask --bins --examples {json...}").read()?;

    let (mut suites, others): (Vec<_>, Vec<_>) =
        artifacts(&tests)?.into_iter().partition(|artifact| artifact.kind == "test");
    let (own_cost, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|artifact| artifact.name == OWN_COST);
    let mut benches = on_gpu(sh, others.into_iter().filter(|artifact| artifact.kind == "bench"))?;
    ensure!(!benches.is_empty(), "no benchmark loads the driver");
    benches.extend(own_cost);
    suites.sort_by(|a, b| a.name.cmp(&b.name));
    ensure!(!suites.is_empty(), "package cuvmm-tests has no integration tests");

    let (examples, programs): (Vec<_>, Vec<_>) =
        artifacts(&programs)?.into_iter().partition(|artifact| artifact.kind == "example");
    let examples = on_gpu(sh, examples)?;
    ensure!(!examples.is_empty(), "no example loads the driver");
    let program = |name: &str| {
        programs
            .iter()
            .find(|artifact| artifact.kind == "bin" && artifact.name == name)
            .map(|artifact| artifact.path.clone())
            .with_context(|| format!("cargo built no binary `{name}`"))
    };
    let (runner, cli) = (program("gpu-test")?, program("cuvmm")?);
    let (process_life, share_with) = (program("process-life")?, program("share-with")?);
    Ok(Binaries { runner, cli, process_life, share_with, suites, examples, benches })
}

/// Those that run on a GPU, in order of name.
fn on_gpu(sh: &Shell, all: impl IntoIterator<Item = Artifact>) -> Result<Vec<Artifact>> {
    let mut on_gpu = Vec::new();
    for artifact in all {
        if loads_driver(&sh.read_file(&artifact.source)?) {
            on_gpu.push(artifact);
        }
    }
    on_gpu.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(on_gpu)
}

/// Whether an example or a benchmark runs on a GPU, by its source: the others are for the simulator alone.
fn loads_driver(source: &str) -> bool {
    ["Driver::load(", "benched_driver()"].iter().any(|call| source.contains(call))
}

/// The executables that a run of cargo reports, one JSON message a line.
pub(crate) fn artifacts(messages: &str) -> Result<Vec<Artifact>> {
    let mut artifacts = Vec::new();
    for line in messages.lines() {
        let message: Value =
            serde_json::from_str(line).with_context(|| format!("cargo reported a line that is not JSON: {line}"))?;
        let Some(path) = message["executable"].as_str() else { continue };
        let target = &message["target"];
        let (Some(kind), Some(name), Some(source)) =
            (target["kind"][0].as_str(), target["name"].as_str(), target["src_path"].as_str())
        else {
            bail!("cargo reported an executable without a target: {line}");
        };
        artifacts.push(Artifact { kind: kind.into(), name: name.into(), path: path.into(), source: source.into() });
    }
    Ok(artifacts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_read_from_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"a"},"executable":null}"#,
            "\n",
            r#"{"target":{"kind":["test"],"name":"grow","src_path":"/s/grow.rs"},"executable":"/t/grow-1"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
            "\n",
        );
        let expected = Artifact {
            kind: "test".into(),
            name: "grow".into(),
            path: PathBuf::from("/t/grow-1"),
            source: PathBuf::from("/s/grow.rs"),
        };
        assert_eq!(artifacts(messages).unwrap(), [expected]);
    }

    #[test]
    fn examples_and_benchmarks_for_a_gpu_are_known_by_their_source() {
        assert!(loads_driver("let driver = if on_gpu { Driver::load()? } else { simulated()? };"));
        assert!(loads_driver("let driver = benched_driver();"));
        assert!(!loads_driver("let driver = Simulator::new(Machine::h200()).driver()?;"));
    }

    #[test]
    fn other_output_is_an_error() {
        let error = artifacts("Compiling cuvmm\n").unwrap_err();
        assert_eq!(error.to_string(), "cargo reported a line that is not JSON: Compiling cuvmm");
    }
}
