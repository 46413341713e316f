//! The command `cuvmm`: shows on this machine what elastic GPU memory does, and what of it works.
#![forbid(unsafe_code)]

mod demo;
mod doctor;
mod flags;
mod machine;
mod pattern;
mod peer;
mod report;

use std::process::ExitCode;

use flags::{Choice, Cuvmm, CuvmmCmd};

fn main() -> ExitCode {
    let flags = match Cuvmm::from_env() {
        Ok(flags) => flags,
        Err(error) if error.is_help() => return ended(report::line(&error.to_string()).map(succeeded)),
        Err(error) => return misunderstood(&error.to_string()),
    };
    let done = match flags.subcommand {
        CuvmmCmd::Demo(demo) => demo::run(demo.driver.unwrap_or_default()).map(succeeded),
        CuvmmCmd::DemoPeer(peer) => peer::run(peer.driver).map(succeeded),
        CuvmmCmd::Doctor(doctor) => {
            let choice = doctor.driver.unwrap_or_default();
            if doctor.machine.is_some() && choice != Choice::Sim {
                return misunderstood("--machine is for --driver sim alone");
            }
            doctor::run(choice, doctor.machine, doctor.json)
        }
    };
    ended(done)
}

fn succeeded((): ()) -> ExitCode {
    ExitCode::SUCCESS
}

/// Says that the flags make no sense.
fn misunderstood(why: &str) -> ExitCode {
    report::failure(&anyhow::anyhow!("{why}; `cuvmm --help` shows how"));
    ExitCode::from(2)
}

/// The exit code, and on standard error what failed.
fn ended(done: anyhow::Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| {
        report::failure(&error);
        ExitCode::FAILURE
    })
}
