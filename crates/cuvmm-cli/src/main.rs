//! The command `cuvmm`: shows on this machine what elastic GPU memory does.
#![forbid(unsafe_code)]

mod demo;
mod flags;
mod machine;
mod pattern;
mod peer;
mod report;

use std::process::ExitCode;

use flags::{Cuvmm, CuvmmCmd};

fn main() -> ExitCode {
    let flags = match Cuvmm::from_env() {
        Ok(flags) => flags,
        Err(error) if error.is_help() => return ended(report::line(&error.to_string())),
        Err(error) => {
            report::failure(&anyhow::anyhow!("{error}; `cuvmm --help` shows how"));
            return ExitCode::from(2);
        }
    };
    let done = match flags.subcommand {
        CuvmmCmd::Demo(demo) => demo::run(demo.driver.unwrap_or_default()),
        CuvmmCmd::DemoPeer(peer) => peer::run(peer.driver),
    };
    ended(done)
}

/// The exit code, and on standard error what failed.
fn ended(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::failure(&error);
            ExitCode::FAILURE
        }
    }
}
