//! The programs that abort when they panic: `process-life`, built so for this, ends as quietly as ever, and a panic ends it
//! at once.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use crate::gpu_test::artifacts;

/// What panics, and so has no quiet end.
const PANICS: &str = "a-panic";
const SIGABRT: i32 = 6;
/// No load takes longer than the reaper's last call is waited for, and a panic nothing.
const AT_ONCE: Duration = Duration::from_secs(20);

/// Runs each load with each of its ends on both of the simulator's presets. The libraries below are those of the other steps:
/// only the program itself is built anew.
pub(crate) fn step(sh: &Shell) -> Result<()> {
    let build = ["--package", "cuvmm-tests", "--bin", "process-life", "--message-format=json-render-diagnostics"];
    let messages = cmd!(sh, "cargo rustc --locked {build...} -- -C panic=abort").read()?;
    let program = artifacts(&messages)?.pop().context("cargo built no program")?.path;
    let list = cmd!(sh, "{program} list").quiet().read()?;
    let mut runs = 0;
    for preset in ["strict", "measured"] {
        for line in list.lines() {
            let (load, ends) = line.split_once(' ').with_context(|| format!("a load without an end: {line}"))?;
            for end in ends.split(' ') {
                let start = Instant::now();
                let output = run(&program, [preset, load, end])?;
                let judged = if load == PANICS { judge_panic(&output) } else { judge_quiet(&output) };
                judged.with_context(|| format!("process-life {preset} {load} {end}: {}", said(&output)))?;
                ensure!(start.elapsed() < AT_ONCE, "process-life {preset} {load} {end} took {:?}", start.elapsed());
                runs += 1;
            }
        }
    }
    ensure!(list.contains(PANICS) && runs > 40, "it has too few loads: {runs} runs");
    println!("{runs} processes that abort when they panic");
    Ok(())
}

fn run(program: &Path, arguments: [&str; 3]) -> Result<Output> {
    Ok(Command::new(program).args(arguments).env("RUST_BACKTRACE", "0").output()?)
}

fn said(output: &Output) -> String {
    format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr))
}

fn judge_quiet(output: &Output) -> Result<()> {
    ensure!(output.status.code() == Some(0), "it did not end well");
    ensure!(output.stdout == b"ready\n", "it did not get to its end");
    ensure!(output.stderr.is_empty(), "it was to be quiet");
    Ok(())
}

/// It ends by the signal, and tells of its panic alone: of where, of what, and how to see more.
fn judge_panic(output: &Output) -> Result<()> {
    ensure!(output.status.signal() == Some(SIGABRT), "it did not abort");
    ensure!(output.stdout == b"ready\n", "it did not get to its panic");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.is_empty()).collect();
    let is_of_panic = matches!(lines[..], [head, "a surprise", note]
        if head.starts_with("thread 'main'") && head.contains("panicked at") && note.starts_with("note: run with"));
    ensure!(is_of_panic, "it was to tell of its panic alone");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::ExitStatus;

    use super::*;

    fn output(status: i32, stdout: &str, stderr: &str) -> Output {
        Output { status: ExitStatus::from_raw(status), stdout: stdout.into(), stderr: stderr.into() }
    }

    #[test]
    fn ends_that_are_not_quiet_are_caught() {
        assert!(judge_quiet(&output(0, "ready\n", "")).is_ok());
        assert!(judge_quiet(&output(1 << 8, "ready\n", "")).is_err());
        assert!(judge_quiet(&output(0, "", "")).is_err());
        assert!(judge_quiet(&output(0, "ready\n", "a word")).is_err());
    }

    #[test]
    fn panics_that_are_not_alone_are_caught() {
        let told = "\nthread 'main' (7) panicked at a.rs:1:1:\na surprise\nnote: run with `RUST_BACKTRACE=1`\n";
        assert!(judge_panic(&output(SIGABRT, "ready\n", told)).is_ok());
        assert!(judge_panic(&output(101 << 8, "ready\n", told)).is_err(), "it unwound");
        assert!(judge_panic(&output(SIGABRT, "", told)).is_err());
        assert!(judge_panic(&output(SIGABRT, "ready\n", &told.repeat(2))).is_err());
        assert!(judge_panic(&output(SIGABRT, "ready\n", &told.replace("main", "cuvmm-reaper"))).is_err());
    }
}
