//! One suite: its tests, and what became of them.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::libtest::{self, Summary};
use crate::process::{self, End, Finished};

/// The modules of tests that need a GPU, with the number of GPUs.
const GROUPS: &[(&str, usize)] = &[("gpu::", 1), ("gpu_x2::", 2)];
const LIST_LIMIT: Duration = Duration::from_secs(60);
/// The lines of output that are kept of a test that died.
const TAIL: usize = 200;

/// The path of a test binary, the name by which it is reported, and where it leaves reports of its own.
pub(crate) struct Suite {
    name: String,
    path: PathBuf,
    report: Option<PathBuf>,
}

/// What became of the tests of a suite.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) suite: String,
    pub(crate) passed: usize,
    pub(crate) failed: Vec<Failure>,
    pub(crate) skipped: Vec<Skipped>,
    /// What the tests that failed wrote.
    pub(crate) output: String,
    pub(crate) time: Duration,
}

#[derive(Debug, PartialEq)]
pub(crate) struct Failure {
    pub(crate) test: String,
    /// Why there is no verdict of the test itself.
    pub(crate) reason: Option<String>,
}

#[derive(Debug, PartialEq)]
pub(crate) struct Skipped {
    pub(crate) tests: usize,
    pub(crate) reason: String,
}

impl Suite {
    /// The suite in the file `path`; cargo ends the names of its files with a hash, which is left off.
    pub(crate) fn new(path: PathBuf, report: Option<PathBuf>) -> Result<Self> {
        // A path without a folder would be looked for in PATH.
        let path = path.canonicalize().with_context(|| format!("no such suite: {}", path.display()))?;
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let name = match name.rsplit_once('-') {
            Some((name, hash)) if hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()) => name.to_owned(),
            _ => name,
        };
        Ok(Self { name, path, report })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs what can run on `gpus` GPUs.
    pub(crate) fn run(&self, gpus: usize, timeout: Duration) -> Outcome {
        let start = Instant::now();
        let mut outcome = Outcome { suite: self.name.clone(), ..Outcome::default() };
        match self.list() {
            Ok(tests) => self.run_tests(tests, gpus, timeout, &mut outcome),
            Err(error) => outcome.fail("(list of tests)", Some(format!("{error:#}"))),
        }
        outcome.time = start.elapsed();
        outcome
    }

    /// The names of the ignored tests.
    fn list(&self) -> Result<Vec<String>> {
        let args = ["--list", "--ignored", "--format", "terse"];
        let finished = process::run(&self.path, &args, None, LIST_LIMIT).context("cannot be started")?;
        anyhow::ensure!(finished.end == End::Code(0), "{}", finished.end);
        Ok(libtest::list(&finished.stdout))
    }

    fn run_tests(&self, mut tests: Vec<String>, gpus: usize, timeout: Duration, outcome: &mut Outcome) {
        for (module, needed) in GROUPS {
            let group: Vec<String> = tests.extract_if(.., |test| test.starts_with(module)).collect();
            if group.is_empty() {
                continue;
            }
            if *needed <= gpus {
                self.run_group(&group, timeout, outcome);
            } else {
                outcome.skip(group.len(), format!("needs {needed} GPUs, {gpus} here"));
            }
        }
        if !tests.is_empty() {
            outcome.skip(tests.len(), "ignored, in no module for a GPU".into());
        }
    }

    /// Runs tests in one process, and alone those that it leaves without a verdict.
    fn run_group(&self, tests: &[String], timeout: Duration, outcome: &mut Outcome) {
        let finished = match self.run_exact(tests, timeout) {
            Ok(finished) => finished,
            Err(error) => return tests.iter().for_each(|test| outcome.fail(test, Some(error.to_string()))),
        };
        let mut report = libtest::parse(&finished.stdout, tests);
        let is_whole = is_whole(&finished, report.summary);
        if is_whole && let Some(summary) = report.summary {
            // The harness counts for itself: lines that say more are not its own.
            let passed = report.verdicts.values().filter(|passed| **passed).count();
            let failed = report.verdicts.len() - passed;
            if passed > summary.passed || failed > summary.failed {
                report.verdicts.clear();
            }
        }
        let mut is_told = false;
        for (test, passed) in &report.verdicts {
            if *passed {
                outcome.passed += 1;
            } else {
                // The harness shows what failed when it ends, and not when a test ends it.
                let lost = (!is_whole).then(|| "failed; its output went with a test that died".to_owned());
                outcome.fail(test, lost);
                is_told = true;
            }
        }
        let died = report.unfinished.filter(|_| !is_whole);
        if let Some(test) = &died {
            outcome.fail(test, Some(finished.end.to_string()));
            is_told = true;
        }
        if is_told {
            outcome.tell(&finished);
        }

        let deadline = Instant::now() + timeout;
        for test in tests {
            if !report.verdicts.contains_key(test) && died.as_ref() != Some(test) {
                self.run_alone(test, deadline, outcome);
            }
        }
    }

    fn run_alone(&self, test: &String, deadline: Instant, outcome: &mut Outcome) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return outcome.fail(test, Some("not run: the suite's time was over".into()));
        }
        let finished = match self.run_exact(std::slice::from_ref(test), left) {
            Ok(finished) => finished,
            Err(error) => return outcome.fail(test, Some(error.to_string())),
        };
        match (finished.end, libtest::parse(&finished.stdout, &[]).summary) {
            (End::Code(0), Some(Summary { passed: 1, failed: 0 })) => outcome.passed += 1,
            (End::Code(101), Some(Summary { failed: 1, .. })) => {
                outcome.fail(test, None);
                outcome.tell(&finished);
            }
            (end, _) => {
                outcome.fail(test, Some(end.to_string()));
                outcome.tell(&finished);
            }
        }
    }

    fn run_exact(&self, tests: &[String], limit: Duration) -> io::Result<Finished> {
        let mut args = vec!["--ignored", "--exact", "--test-threads=1", "--color=never"];
        args.extend(tests.iter().map(String::as_str));
        process::run(&self.path, &args, self.report.as_deref(), limit)
    }
}

/// Whether the harness came to its own end.
fn is_whole(finished: &Finished, summary: Option<Summary>) -> bool {
    matches!(finished.end, End::Code(0 | 101)) && summary.is_some()
}

impl Outcome {
    /// The number of tests that were skipped.
    pub(crate) fn skipped(&self) -> usize {
        self.skipped.iter().map(|skipped| skipped.tests).sum()
    }

    /// Why tests were skipped or have no verdict, in one line.
    pub(crate) fn reason(&self) -> String {
        let mut reasons: Vec<String> = self.skipped.iter().map(|skipped| skipped.reason.clone()).collect();
        let failed = self
            .failed
            .iter()
            .filter_map(|failure| failure.reason.as_ref().map(|reason| format!("{}: {reason}", failure.test)));
        reasons.extend(failed);
        if self.passed + self.failed.len() + self.skipped() == 0 {
            reasons.push("no tests for a GPU".into());
        }
        reasons.join("; ")
    }

    fn fail(&mut self, test: &str, reason: Option<String>) {
        self.failed.push(Failure { test: test.to_owned(), reason });
    }

    fn skip(&mut self, tests: usize, reason: String) {
        self.skipped.push(Skipped { tests, reason });
    }

    /// Keeps what a run wrote in which a test failed.
    fn tell(&mut self, finished: &Finished) {
        let died = tail(&finished.stdout);
        let parts = [libtest::failures(&finished.stdout).unwrap_or(&died), &tail(&finished.stderr)].map(str::to_owned);
        for part in parts.iter().map(|part| part.trim_end()).filter(|part| !part.is_empty()) {
            self.output.push_str(part);
            self.output.push('\n');
        }
    }
}

/// The last lines of a text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Long for a test, short of a hang.
    const LIMIT: Duration = Duration::from_secs(20);

    /// A script that answers as a test harness does, with the tests of its name.
    fn fixture(name: &str) -> Suite {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bin/gpu-test/fixtures");
        Suite::new(PathBuf::from(format!("{folder}/{name}")), None).unwrap()
    }

    fn failures(outcome: &Outcome) -> Vec<(&str, Option<&str>)> {
        outcome.failed.iter().map(|failure| (failure.test.as_str(), failure.reason.as_deref())).collect()
    }

    fn skips(outcome: &Outcome) -> Vec<(usize, &str)> {
        outcome.skipped.iter().map(|skipped| (skipped.tests, skipped.reason.as_str())).collect()
    }

    #[test]
    fn names_have_no_hash() {
        assert_eq!(fixture("mixed").name(), "mixed");
        let program = Suite::new(std::env::current_exe().unwrap(), None).unwrap();
        assert!(["gpu_test", "gpu-test"].contains(&program.name()), "{}", program.name());
    }

    #[test]
    fn what_passes_fails_and_is_skipped() {
        let outcome = fixture("mixed").run(1, LIMIT);
        assert_eq!(outcome.passed, 2);
        assert_eq!(failures(&outcome), [("gpu::fails", None)]);
        assert_eq!(skips(&outcome), [(1, "needs 2 GPUs, 1 here"), (1, "ignored, in no module for a GPU")]);
        assert_eq!(outcome.output, "---- gpu::fails stdout ----\nno memory\n");
    }

    #[test]
    fn two_gpus_run_more() {
        let outcome = fixture("mixed").run(2, LIMIT);
        assert_eq!(outcome.passed, 3);
        assert_eq!(skips(&outcome), [(1, "ignored, in no module for a GPU")]);
    }

    #[test]
    fn a_test_that_dies_does_not_take_the_others_along() {
        let outcome = fixture("dying").run(1, LIMIT);
        assert_eq!(outcome.passed, 2);
        assert_eq!(
            failures(&outcome),
            [
                ("gpu::fails", Some("failed; its output went with a test that died")),
                ("gpu::crashes", Some("SIGSEGV")),
                ("gpu::exits", Some("exit code 0")),
                ("gpu::also_fails", None),
            ]
        );
        assert!(outcome.output.contains("a word on stderr"), "{}", outcome.output);
        assert!(outcome.reason().ends_with("gpu::crashes: SIGSEGV; gpu::exits: exit code 0"), "{}", outcome.reason());
    }

    #[test]
    fn a_test_that_hangs_ends_at_its_limit() {
        let limit = Duration::from_secs(1);
        let outcome = fixture("hanging").run(1, limit);
        assert_eq!(outcome.passed, 1);
        assert_eq!(failures(&outcome), [("gpu::hangs", Some("no end within 1s"))]);
        assert!(outcome.time < LIMIT, "{:?}", outcome.time);
    }

    #[test]
    fn a_suite_without_tests_says_so() {
        let outcome = fixture("empty").run(1, LIMIT);
        assert_eq!((outcome.passed, failures(&outcome), outcome.skipped()), (0, vec![], 0));
        assert_eq!(outcome.reason(), "no tests for a GPU");
    }

    #[test]
    fn a_suite_that_cannot_list_fails() {
        let outcome = fixture("broken").run(1, LIMIT);
        assert_eq!(failures(&outcome), [("(list of tests)", Some("exit code 3"))]);
    }

    #[test]
    fn a_real_harness_is_understood() {
        let test = "table::tests::a_table";
        let args = ["--exact", "--test-threads=1", "--color=never", test];
        let finished = process::run(&std::env::current_exe().unwrap(), &args, None, LIMIT).unwrap();
        let report = libtest::parse(&finished.stdout, &[test.to_owned()]);
        assert_eq!(report.verdicts, [(test.to_owned(), true)].into());
        assert_eq!(report.summary, Some(Summary { passed: 1, failed: 0 }));
        assert!(is_whole(&finished, report.summary));
    }
}
