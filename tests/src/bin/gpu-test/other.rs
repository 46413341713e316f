//! Sharing with programs of another make: `share-with`, which is no suite of tests, and is reported like one.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::process::{self, End};
use crate::suite::{Failure, Outcome, Skipped};

const NAME: &str = "share-with";
/// What it runs, as the system has it.
const PYTHON: &str = "python3";
/// Its exit code where the other program is not there.
const NOT_RUN: i32 = 3;

/// Whether a file that was named as a suite is that program.
pub(crate) fn is_named(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == NAME)
}

/// That program, in the folder of this one.
pub(crate) fn beside(program: &Path) -> PathBuf {
    program.with_file_name(NAME)
}

/// Shares both ways.
pub(crate) fn run(program: &Path, timeout: Duration) -> Outcome {
    let start = Instant::now();
    let mut outcome = Outcome { suite: NAME.to_owned(), ..Outcome::default() };
    let fail = |reason| vec![Failure { test: PYTHON.to_owned(), reason: Some(reason) }];
    match process::run(program, &[PYTHON], None, timeout) {
        Ok(finished) => match finished.end {
            End::Code(0) => outcome.passed = 2,
            End::Code(NOT_RUN) => {
                let reason = finished.stdout.trim_end().to_owned();
                outcome.skipped = vec![Skipped { tests: 2, reason }];
            }
            end => {
                outcome.failed = fail(end.to_string());
                outcome.output = finished.stdout + &finished.stderr;
            }
        },
        Err(error) => outcome.failed = fail(format!("{}: {error}", program.display())),
    }
    outcome.time = start.elapsed();
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_fixture(name: &str) -> Outcome {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bin/gpu-test/fixtures");
        run(&PathBuf::from(format!("{folder}/{name}")), Duration::from_secs(20))
    }

    #[test]
    fn what_was_not_run_is_skipped_with_its_reason() {
        let outcome = run_fixture("not-run");
        let reason = "not run: no python3 here".to_owned();
        assert_eq!((outcome.passed, outcome.failed.len()), (0, 0));
        assert_eq!(outcome.skipped, [Skipped { tests: 2, reason }]);
    }

    #[test]
    fn what_passed_counts_and_what_ends_otherwise_failed() {
        // This one says that both ways passed, whatever it is asked.
        let outcome = run(Path::new("/bin/true"), Duration::from_secs(20));
        assert_eq!((outcome.passed, outcome.failed.len(), outcome.skipped()), (2, 0, 0));
        for program in ["/bin/false", "/no/such/program"] {
            let outcome = run(Path::new(program), Duration::from_secs(20));
            assert_eq!((outcome.passed, outcome.failed.len(), outcome.skipped()), (0, 1, 0));
        }
    }

    #[test]
    fn it_is_known_by_its_name() {
        assert!(is_named(&beside(Path::new("/bundle/gpu-test"))));
        assert!(!is_named(Path::new("/bundle/suites/share")));
    }
}
