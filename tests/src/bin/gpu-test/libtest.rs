//! What the test harness of Rust prints, read back.

use std::collections::{BTreeMap, BTreeSet};

/// What a run of a suite says of its tests.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Report {
    /// The tests with a verdict: whether they passed.
    pub(crate) verdicts: BTreeMap<String, bool>,
    /// The test that was announced last and has no verdict.
    pub(crate) unfinished: Option<String>,
    /// The closing line, which a run that died does not print.
    pub(crate) summary: Option<Summary>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
}

/// The names in the output of `--list --format terse`.
pub(crate) fn list(stdout: &str) -> Vec<String> {
    stdout.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

/// Reads the output of a run of the tests `names` with `--test-threads=1`.
///
/// A line is `test NAME ... ok` or `test NAME ... FAILED`. What a child of the test writes comes
/// between the dots and the verdict, which then may stand on a later line, alone. A child may be
/// a test harness too: lines of other names are passed over, and a name that is announced twice
/// has no verdict.
pub(crate) fn parse(stdout: &str, names: &[String]) -> Report {
    let mut report = Report::default();
    let mut announced = BTreeSet::new();
    let mut ambiguous = BTreeSet::new();
    for line in stdout.lines() {
        let verdict = match announcement(line) {
            Some((name, _)) if !names.iter().any(|known| known == name) => None,
            Some((name, rest)) => {
                if !announced.insert(name) {
                    ambiguous.insert(name);
                }
                report.unfinished = Some(name.to_owned());
                verdict(rest)
            }
            None => verdict(line),
        };
        if let Some(verdict) = verdict
            && let Some(name) = report.unfinished.take()
        {
            report.verdicts.insert(name, verdict);
        }
        if let Some(summary) = summary(line) {
            report.summary = Some(summary);
        }
    }
    report.verdicts.retain(|name, _| !ambiguous.contains(name.as_str()));
    report
}

/// Splits `test NAME ... REST`.
fn announcement(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    Some((name.strip_suffix(" - should panic").unwrap_or(name), rest))
}

fn verdict(text: &str) -> Option<bool> {
    match text {
        "ok" => Some(true),
        "FAILED" => Some(false),
        _ => None,
    }
}

/// Reads `test result: ok. 3 passed; 0 failed; …`.
fn summary(line: &str) -> Option<Summary> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what: &str| {
        let part = counts.split("; ").find_map(|part| part.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    Some(Summary { passed: count(" passed")?, failed: count(" failed")? })
}

/// The part of the output that says why tests failed.
pub(crate) fn failures(stdout: &str) -> Option<&str> {
    let (_, rest) = stdout.split_once("\nfailures:\n")?;
    let details = rest.rsplit_once("\nfailures:\n").map_or(rest, |(details, _)| details);
    Some(details.trim_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: &str = "
running 3 tests
test gpu::fails ... FAILED
test gpu::panics - should panic ... ok
test gpu::passes ... ok

failures:

---- gpu::fails stdout ----

thread 'gpu::fails' panicked at src/x.rs:1:1:
no memory

failures:
    gpu::fails

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 4 filtered out; finished in 0.00s

";

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_list() {
        let stdout = "gpu::grow: test\ngpu_x2::peers: test\ngpu::speed: benchmark\n\n2 tests, 1 benchmark\n";
        assert_eq!(list(stdout), ["gpu::grow", "gpu_x2::peers"]);
    }

    #[test]
    fn a_whole_run() {
        let verdicts = [("gpu::fails", false), ("gpu::panics", true), ("gpu::passes", true)];
        let expected = Report {
            verdicts: verdicts.map(|(name, passed)| (name.to_owned(), passed)).into(),
            unfinished: None,
            summary: Some(Summary { passed: 2, failed: 1 }),
        };
        assert_eq!(parse(MIXED, &names(&["gpu::fails", "gpu::panics", "gpu::passes"])), expected);
        assert_eq!(
            failures(MIXED),
            Some("---- gpu::fails stdout ----\n\nthread 'gpu::fails' panicked at src/x.rs:1:1:\nno memory")
        );
    }

    #[test]
    fn single_runs() {
        let check = |stdout: &str, verdicts: &[(&str, bool)], unfinished: Option<&str>| {
            let report = parse(stdout, &names(&["a", "b"]));
            let expected = verdicts.iter().map(|(name, passed)| ((*name).to_owned(), *passed)).collect();
            assert_eq!(report.verdicts, expected, "{stdout}");
            assert_eq!(report.unfinished.as_deref(), unfinished, "{stdout}");
        };
        check("", &[], None);
        check("running 2 tests\ntest a ... ok\ntest b ... ", &[("a", true)], Some("b"));
        check("test a ... noise of a child\nok\ntest b ... FAILED\n", &[("a", true), ("b", false)], None);
        check("test a ... took\ntest b ... ok\n", &[("b", true)], None);
        check("test a ... noise, ok\n", &[], Some("a"));
        check("ok\n", &[], None);
        check("test a ... \nrunning 1 test\ntest child ... ok\n\nFAILED\n", &[("a", false)], None);
        check("test a ... \nrunning 1 test\ntest a ... ok\n\nFAILED\ntest b ... ok\n", &[("b", true)], None);
    }

    #[test]
    fn summaries() {
        let check = |line: &str, expect| assert_eq!(summary(line), expect, "{line}");
        check("test result: ok. 12 passed; 0 failed; 0 ignored", Some(Summary { passed: 12, failed: 0 }));
        check("test result: FAILED. 0 passed; 3 failed; 0 ignored", Some(Summary { passed: 0, failed: 3 }));
        check("test result: ok", None);
        check("test grow ... ok", None);
    }
}
