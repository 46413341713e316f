//! The table of the suites, and the line that closes it.

use std::fmt;

use crate::suite::Outcome;

const HEAD: [&str; 5] = ["suite", "passed", "failed", "skipped", "reason"];

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Totals {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Totals {
    /// Something passed, and nothing failed.
    pub(crate) fn is_success(&self) -> bool {
        self.passed > 0 && self.failed == 0
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

pub(crate) fn totals(outcomes: &[Outcome]) -> Totals {
    let sum = |count: fn(&Outcome) -> usize| outcomes.iter().map(count).sum();
    Totals {
        passed: sum(|outcome| outcome.passed),
        failed: sum(|outcome| outcome.failed.len()),
        skipped: sum(Outcome::skipped),
    }
}

/// One line a suite; names to the left, numbers to the right.
pub(crate) fn render(outcomes: &[Outcome]) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(outcomes.iter().map(|outcome| {
        [
            outcome.suite.clone(),
            outcome.passed.to_string(),
            outcome.failed.len().to_string(),
            outcome.skipped().to_string(),
            outcome.reason(),
        ]
    }));
    let first = rows.iter().map(|row| row[0].chars().count()).max().unwrap_or(0);
    let mut table = String::new();
    for [suite, passed, failed, skipped, reason] in &rows {
        let line = format!("{suite:first$} | {passed:>6} | {failed:>6} | {skipped:>7} | {reason}");
        table.push_str(line.trim_end());
        table.push('\n');
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::{Failure, Skipped};

    fn outcomes() -> Vec<Outcome> {
        let dead = Failure { test: "gpu::peer".into(), reason: Some("SIGSEGV".into()) };
        let skipped = Skipped { tests: 2, reason: "needs 2 GPUs, 1 here".into() };
        vec![
            Outcome { suite: "allocate".into(), passed: 12, ..Outcome::default() },
            Outcome {
                suite: "ipc".into(),
                passed: 3,
                failed: vec![dead],
                skipped: vec![skipped],
                ..Outcome::default()
            },
            Outcome { suite: "sizes".into(), ..Outcome::default() },
        ]
    }

    #[test]
    fn a_table() {
        let expected = "\
suite    | passed | failed | skipped | reason
allocate |     12 |      0 |       0 |
ipc      |      3 |      1 |       2 | needs 2 GPUs, 1 here; gpu::peer: SIGSEGV
sizes    |      0 |      0 |       0 | no tests for a GPU
";
        assert_eq!(render(&outcomes()), expected);
        assert_eq!(totals(&outcomes()).to_string(), "15 passed, 1 failed, 2 skipped");
    }

    #[test]
    fn success_needs_a_pass_and_no_failure() {
        let check = |passed, failed, skipped, expect| {
            assert_eq!(Totals { passed, failed, skipped }.is_success(), expect, "{passed} {failed} {skipped}");
        };
        check(1, 0, 0, true);
        check(1, 0, 5, true);
        check(1, 1, 0, false);
        check(0, 0, 0, false);
        check(0, 0, 5, false);
    }
}
