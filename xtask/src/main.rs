//! The tasks of this workspace: `cargo xtask --help` lists them.
#![forbid(unsafe_code)]

mod abort;
mod bench;
mod bundle;
mod ci;
mod flags;
mod fuzz;
mod gpu_test;
mod instructions;
mod interop;
mod metadata;
mod release;
mod shuttle;
mod soak;
mod tidy;
mod tsan;

use std::path::{self, Path};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use xshell::Shell;

fn main() -> ExitCode {
    let flags = flags::Xtask::from_env_or_exit();
    match run(flags) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: flags::Xtask) -> Result<ExitCode> {
    let sh = Shell::new()?;
    // A path of the caller's is relative to where they are, not to the workspace.
    let caller = sh.current_dir();
    sh.change_dir(workspace_root()?);
    match flags.subcommand {
        flags::XtaskCmd::Ci(_) => ci::run(&sh).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::Bench(options) => bench::run(&sh, &options, &caller).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::Instructions(_) => instructions::run(&sh).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::Interop(_) => interop::run(&sh).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::Fuzz(mut fuzz) => {
            fuzz.again = fuzz.again.map(|file| caller.join(file));
            fuzz::run(&sh, &fuzz).map(|()| ExitCode::SUCCESS)
        }
        flags::XtaskCmd::Tsan(_) => tsan::run(&sh).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::Tidy(_) => tidy::run(&sh).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::Release(_) => release::dry_run(&sh).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::Shuttle(models) => {
            shuttle::run(&sh, models.schedules, models.seed).map(|()| ExitCode::SUCCESS)
        }
        flags::XtaskCmd::Soak(soak) => soak::run(&sh, &soak).map(|()| ExitCode::SUCCESS),
        flags::XtaskCmd::GpuTest(gpu_test) => match gpu_test.bundle {
            None => gpu_test::run_here(&sh, gpu_test.report.map(|dir| caller.join(dir)).as_deref()),
            Some(dir) => {
                ensure!(gpu_test.report.is_none(), "a bundle is run elsewhere: ./gpu-test --report DIR in it");
                gpu_test::write_bundle(&sh, &caller.join(dir)).map(|()| ExitCode::SUCCESS)
            }
        },
    }
}

/// Asked of cargo as it runs this: what was compiled may be another checkout's, where two have one target folder.
fn workspace_root() -> Result<path::PathBuf> {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&xtask).parent().map(Path::to_owned).context("xtask stands in a folder of the workspace")
}
