//! `gpu-test`: runs the suites that need a GPU, and says what passed, failed and was skipped.
//!
//! A suite is an integration test binary of this package. Its ignored tests in the module `gpu`
//! need one GPU, those in `gpu_x2` two. The suites stand in the folder `suites` beside this
//! program, or are named as arguments. So is the program `share-with`, which stands beside this one.
//! Without a GPU there is an error, never a pass.
#![forbid(unsafe_code)]

mod args;
mod libtest;
mod other;
mod process;
mod suite;
mod table;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::slice;
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use cuvmm_tests::Machine;

use crate::args::{Args, USAGE};
use crate::suite::Suite;

/// Something failed, or nothing passed.
const FAILED: u8 = 1;
/// Nothing was run: no GPU, no suite, or a wrong argument.
const NOT_RUN: u8 = 2;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(NOT_RUN)
        }
    }
}

fn run() -> Result<ExitCode> {
    let args = match args::parse(env::args_os().skip(1))? {
        Args::Help => {
            print!("{USAGE}");
            return Ok(ExitCode::SUCCESS);
        }
        Args::Run(options) => options,
    };
    let machine = Machine::this()?;
    println!("{machine}");
    let suites = if args.suites.is_empty() { suites_beside()? } else { args.suites };

    let report = args.report.map(create_report).transpose()?;

    println!();
    let mut outcomes = Vec::new();
    for path in suites {
        let outcome = if other::is_named(&path) {
            print!("{}: ", path.display());
            io::stdout().flush()?;
            other::run(&path, args.timeout)
        } else {
            let suite = Suite::new(path, report.clone())?;
            print!("{}: ", suite.name());
            io::stdout().flush()?;
            suite.run(machine.gpus.len(), args.timeout)
        };
        println!("{}, {:.1} s", table::totals(slice::from_ref(&outcome)), outcome.time.as_secs_f64());
        outcomes.push(outcome);
    }
    for outcome in outcomes.iter().filter(|outcome| !outcome.output.is_empty()) {
        println!("\n---- {} ----\n{}", outcome.suite, outcome.output.trim_end());
    }
    println!("\n{machine}\n{}", table::render(&outcomes));
    let totals = table::totals(&outcomes);
    println!("{totals}");
    Ok(if totals.is_success() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The folder that suites write reports to, which is made where it is not there yet.
fn create_report(dir: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    // Suites may run in another folder.
    dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))
}

/// The files of the folder `suites` beside this program, in order of name, and then `share-with`.
fn suites_beside() -> Result<Vec<PathBuf>> {
    let program = env::current_exe().context("cannot tell where this program stands")?;
    let folder = program.with_file_name("suites");
    let entries = folder
        .read_dir()
        .with_context(|| format!("no suites: name them as arguments, or keep them in {}", folder.display()))?;
    let mut suites = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            suites.push(entry.path());
        }
    }
    ensure!(!suites.is_empty(), "no suites in {}", folder.display());
    suites.sort();
    suites.push(other::beside(&program));
    Ok(suites)
}
