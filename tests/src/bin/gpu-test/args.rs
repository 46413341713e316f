//! The command line of the runner.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

pub(crate) const USAGE: &str = "\
gpu-test [--timeout SECONDS] [--report DIR] [SUITE...]

Runs the tests that need a GPU. Without a SUITE (the path of a test binary): all
those in the folder `suites` beside this program.

    --timeout SECONDS  what a suite may take (300); the tests that a crash kept
                       from running get as much again
    --report DIR       where suites leave their reports: what the conformance
                       suite was answered, as driver-behaviour.md and answers.txt
";

const TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Debug, PartialEq)]
pub(crate) enum Args {
    Help,
    Run(Options),
}

#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    pub(crate) suites: Vec<PathBuf>,
    pub(crate) timeout: Duration,
    pub(crate) report: Option<PathBuf>,
}

pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Args> {
    let mut options = Options { suites: Vec::new(), timeout: TIMEOUT, report: None };
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        match arg.to_str() {
            Some("-h" | "--help") => return Ok(Args::Help),
            Some("--timeout") => {
                let value = args.next().context("--timeout needs a number of seconds")?;
                let seconds = value.to_str().and_then(|text| text.parse().ok()).filter(|n| *n > 0);
                let seconds = seconds.with_context(|| format!("--timeout: not a number of seconds: {value:?}"))?;
                options.timeout = Duration::from_secs(seconds);
            }
            Some("--report") => options.report = Some(args.next().context("--report needs a folder")?.into()),
            Some(flag) if flag.starts_with('-') => bail!("unknown option {flag}\n\n{USAGE}"),
            _ => {
                let path = PathBuf::from(arg);
                ensure!(path.is_file(), "no such suite: {}", path.display());
                options.suites.push(path);
            }
        }
    }
    Ok(Args::Run(options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Args, String> {
        parse(args.iter().map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments() {
        let run = |suites: &[&str], seconds| {
            let suites = suites.iter().map(PathBuf::from).collect();
            Ok(Args::Run(Options { suites, timeout: Duration::from_secs(seconds), report: None }))
        };
        let check = |args: &[&str], expect| assert_eq!(parsed(args), expect, "{args:?}");
        check(&[], run(&[], 300));
        check(&["--timeout", "7"], run(&[], 7));
        check(&["Cargo.toml"], run(&["Cargo.toml"], 300));
        check(&["Cargo.toml", "--help"], Ok(Args::Help));
        let reported = Options { suites: Vec::new(), timeout: TIMEOUT, report: Some("answers".into()) };
        check(&["--report", "answers"], Ok(Args::Run(reported)));
        check(&["--report"], Err("--report needs a folder".into()));
        check(&["--timeout"], Err("--timeout needs a number of seconds".into()));
        check(&["--timeout", "0"], Err("--timeout: not a number of seconds: \"0\"".into()));
        check(&["absent"], Err("no such suite: absent".into()));
        check(&["--fast"], Err(format!("unknown option --fast\n\n{USAGE}")));
    }
}
