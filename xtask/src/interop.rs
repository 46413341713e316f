//! `cargo xtask interop`: try the wire format in Python, and run programs that are not ours on the stand-in library:
//! NVIDIA's bindings for Python, by themselves, and sharing memory with ours both ways.
//!
//! ```text
//! target/interop/lib/libcuda.so.1  the stand-in, where any other program finds it, too
//! target/interop/venv              the bindings, kept for the next time
//! ```

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use xshell::{Cmd, Shell, cmd};

use crate::gpu_test;

const LIBRARY: &str = "cuvmm_sim_libcuda";
const FOLDER: &str = "target/interop";
const REQUIREMENTS: &str = "interop/python/requirements.txt";
const PROGRAM: &str = "interop/python/vmm_round_trip.py";
/// What needs neither the bindings nor the stand-in.
const WIRE_TEST: &str = "interop/python/wire_test.py";
/// The oldest Python that the bindings are made for.
const PYTHON: [u32; 2] = [3, 10];
/// The variables that the program is run with, one each time.
const RUNS: &[(&str, &str)] =
    &[("CUVMM_SIM_PRESET", "strict"), ("CUVMM_SIM_PRESET", "measured"), (PER_THREAD_STREAMS, "1")];
/// What stands before the counts in a line of the log.
const ALIVE: &str = "; alive: ";
/// How many processes the program has, and how many share with each other: ours with one and then another of Python's.
const PROCESSES: usize = 2;
const SHARING: usize = 3;
/// Has the bindings look for the per-thread forms of calls.
const PER_THREAD_STREAMS: &str = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM";

/// Tries the wire format in Python by itself, runs the programs on the stand-in once for each of `RUNS`, and demands that
/// they break no rule and give everything back.
pub(crate) fn run(sh: &Shell) -> Result<()> {
    let folder = sh.current_dir().join(FOLDER);
    let libraries = install_library(sh, &folder)?;
    let python = install_bindings(sh, &folder)?;
    println!("-- {WIRE_TEST}");
    cmd!(sh, "{python} -B {WIRE_TEST}").quiet().run()?;
    let share_with = build_share_with(sh)?;
    let log = folder.join("log");
    for run in RUNS {
        println!("-- {PROGRAM} on the stand-in, {}={}", run.0, run.1);
        let said = run_on_stand_in(sh, cmd!(sh, "{python} {PROGRAM}"), &libraries, &log, *run)?;
        println!("{said}");
        ensure!(said.lines().last() == Some("ok"), "{PROGRAM} did not end with `ok`");
        judge_log(sh, &log, PROCESSES)?;

        println!("-- share-with on the stand-in, {}={}", run.0, run.1);
        println!("{}", run_on_stand_in(sh, cmd!(sh, "{share_with} {python}"), &libraries, &log, *run)?);
        judge_log(sh, &log, SHARING)?;
    }
    Ok(())
}

/// Runs a program with a log of its own, and tells what it says.
fn run_on_stand_in(
    sh: &Shell,
    program: Cmd<'_>,
    libraries: &Path,
    log: &Path,
    (name, value): (&str, &str),
) -> Result<String> {
    sh.remove_path(log)?;
    let mut program = program.env("LD_LIBRARY_PATH", libraries);
    for (setting, _) in env::vars_os().filter(|(setting, _)| is_setting(&setting.to_string_lossy())) {
        program = program.env_remove(setting);
    }
    Ok(program.env("CUVMM_SIM_LOG", log).env(name, value).quiet().read()?)
}

/// Builds the program of ours that shares with another.
fn build_share_with(sh: &Shell) -> Result<PathBuf> {
    let messages = cmd!(
        sh,
        "cargo build --package cuvmm-tests --bin share-with --locked --message-format=json-render-diagnostics"
    );
    let built = gpu_test::artifacts(&messages.read()?)?;
    let program = built.into_iter().find(|artifact| artifact.name == "share-with");
    Ok(program.context("cargo built no binary `share-with`")?.path)
}

/// Whether a variable sets up the stand-in or the bindings, which a program here is not to inherit.
fn is_setting(name: &str) -> bool {
    name.starts_with("CUVMM_SIM_") || name == "CUDA_VISIBLE_DEVICES" || name == PER_THREAD_STREAMS
}

/// Leaves the stand-in library in a folder of its own, under the driver's name.
fn install_library(sh: &Shell, folder: &Path) -> Result<PathBuf> {
    let messages =
        cmd!(sh, "cargo build --package cuvmm-sim-libcuda --locked --message-format=json-render-diagnostics").read()?;
    let built = library_of(&messages)?;
    let libraries = sh.create_dir(folder.join("lib"))?;
    let library = libraries.join("libcuda.so.1");
    // A program that has the old one loaded keeps it.
    sh.remove_path(&library)?;
    fs::copy(&built, &library).with_context(|| format!("failed to copy {}", built.display()))?;
    Ok(libraries)
}

/// The shared library among what a run of cargo reports, one JSON message a line.
fn library_of(messages: &str) -> Result<PathBuf> {
    for line in messages.lines() {
        let message: Value =
            serde_json::from_str(line).with_context(|| format!("cargo reported a line that is not JSON: {line}"))?;
        if message["target"]["name"].as_str() != Some(LIBRARY) {
            continue;
        }
        let mut files = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
        if let Some(file) = files.find(|file| file.ends_with(".so")) {
            return Ok(file.into());
        }
    }
    bail!("cargo built no shared library {LIBRARY}")
}

/// The Python of an environment that has the bindings, which is made where it is not there or has others.
fn install_bindings(sh: &Shell, folder: &Path) -> Result<PathBuf> {
    let version = python_version(sh)?;
    let wanted = format!("{version}\n{}", sh.read_file(REQUIREMENTS)?);
    let environment = folder.join("venv");
    let python = environment.join("bin/python");
    // Written last, so that an environment that is left half made is made anew.
    let stamp = environment.join("made-of");
    if sh.read_file(&stamp).is_ok_and(|made_of| made_of == wanted) {
        return Ok(python);
    }
    println!("-- making {FOLDER}/venv, with {version}");
    sh.remove_path(&environment)?;
    cmd!(sh, "python3 -m venv {environment}").quiet().run().context(
        "python3 cannot make a virtual environment: install its venv module (on Debian the package python3-venv)",
    )?;
    cmd!(sh, "{python} -m pip install --quiet --disable-pip-version-check --only-binary :all: -r {REQUIREMENTS}")
        .quiet()
        .run()
        .context("NVIDIA's bindings for Python cannot be installed; pip needs a package index for that")?;
    sh.write_file(&stamp, wanted)?;
    Ok(python)
}

/// What `python3` says that it is, if it is new enough.
fn python_version(sh: &Shell) -> Result<String> {
    let version = cmd!(sh, "python3 --version").quiet().read();
    let version = version.context("there is no python3: the step `interop` needs it, with its module venv")?;
    judge_python(&version)?;
    Ok(version)
}

fn judge_python(version: &str) -> Result<()> {
    let numbers: Vec<u32> =
        version.trim_start_matches("Python ").split('.').map_while(|number| number.parse().ok()).take(2).collect();
    let [major, minor] = PYTHON;
    ensure!(numbers.len() == 2, "`python3 --version` says no version: {version:?}");
    ensure!(numbers[..] >= PYTHON[..], "{version} is too old for NVIDIA's bindings, which need {major}.{minor}");
    Ok(())
}

/// Checks what every process that ran on the stand-in left in its log: no violation, and nothing alive.
fn judge_log(sh: &Shell, log: &Path, processes: usize) -> Result<()> {
    let log = sh.read_file(log).context("the stand-in wrote no log: it was not what the program ran on")?;
    judge(&log, processes)
}

fn judge(log: &str, expected: usize) -> Result<()> {
    let processes = log.lines().filter(|line| line.contains(ALIVE)).count();
    ensure!(processes >= expected, "{processes} processes ran on the stand-in, not {expected}:\n{log}");
    let wrong: Vec<&str> = log.lines().filter(|line| !line.contains("]: 0 violations; ")).collect();
    ensure!(wrong.is_empty(), "the program did what the driver's documentation forbids:\n{}", wrong.join("\n"));
    let left: Vec<&str> = log.lines().filter(|line| is_anything_alive(line)).collect();
    ensure!(left.is_empty(), "the program did not give everything back:\n{}", left.join("\n"));
    Ok(())
}

/// Whether a line of the log counts anything that is alive.
fn is_anything_alive(line: &str) -> bool {
    let counts = line.split_once(ALIVE).map_or("", |(_, counts)| counts);
    counts.contains(|letter: char| letter.is_ascii_digit() && letter != '0')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_in_messages() {
        let messages = concat!(
            r#"{"target":{"name":"cuvmm_sim"},"filenames":["/t/libcuvmm_sim.rlib"]}"#,
            "\n",
            r#"{"target":{"name":"cuvmm_sim_libcuda"},"filenames":["/t/liba.rlib","/t/liba.so"]}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        assert_eq!(library_of(messages).unwrap(), PathBuf::from("/t/liba.so"));
        assert!(library_of(r#"{"reason":"build-finished","success":true}"#).is_err());
    }

    /// What docs/wire-format.md asks of a program of another make is little.
    #[test]
    fn the_wire_format_takes_sixty_lines() {
        let lines = include_str!("../../interop/python/cuvmm_wire.py").lines().count();
        assert!(lines <= 60, "{lines} lines");
    }

    #[test]
    fn an_older_python_is_refused() {
        let check = |version: &str, expect: bool| assert_eq!(judge_python(version).is_ok(), expect, "{version}");
        check("Python 3.9.2", false);
        check("Python 3.10.0", true);
        check("Python 3.12.3+", true);
        check("Python 2.7", false);
        check("", false);
    }

    #[test]
    fn violations_and_what_is_left_in_the_log_are_told() {
        let clean = "cuvmm-sim[7]: 0 violations; alive: Live { mappings: 0, device_bytes: {} }\n";
        let refused = |second: &str| judge(&format!("{clean}{second}"), 2).unwrap_err().to_string();
        assert!(judge(&format!("{clean}{clean}"), 2).is_ok());
        assert!(refused("").contains("1 processes ran"));
        let error = refused("cuvmm-sim[8]: violation: cuMemUnmap: a hole\ncuvmm-sim[8]: 1 violations; alive: \n");
        assert!(error.contains("a hole") && !error.contains("[7]"), "{error}");
        let error = refused("cuvmm-sim[8]: 0 violations; alive: Live { mappings: 10 }\n");
        assert!(error.contains("mappings: 10") && !error.contains("[7]"), "{error}");
    }
}
