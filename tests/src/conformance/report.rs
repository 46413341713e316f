//! `docs/driver-behaviour.md`: what a GPU answered, and where the simulators differ.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;

use super::parse::{Check, Need, Section};
use super::run::{Asked, equals};
use crate::Machine;

/// Names the folder for reports, in the environment of a suite.
pub const REPORT: &str = "CUVMM_REPORT";

/// What a check was answered by whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// By a GPU.
    pub gpu: Asked,
    /// By [`Preset::Measured`](cuvmm_sim::Preset::Measured).
    pub measured: Asked,
    /// By [`Preset::Strict`](cuvmm_sim::Preset::Strict).
    pub strict: Asked,
}

/// All answers, by the check's name. A check that could not be asked is not among them.
pub type AllAnswers = BTreeMap<String, Answers>;

/// How answers are written, for who reads the table.
const NOTATION: &str = "\
Each check has a driver of its own, which has just been started. Its answers are those of its calls that are in question, in
order: the result code, and what the call tells beside it. `crash`: the process died in the call. `hang`: the call did not return.
`undefined`: it crashed one time, and answered another. `=`: as the GPU. Where a GPU crashes or hangs, a simulator notes something
undefined and goes on, which counts as the same. The calls themselves stand in `tests/conformance`, a file a section.
";

/// Writes the report, and beside it all answers line by line.
///
/// # Errors
/// What the file system says.
pub fn write_report(dir: &Path, machine: &Machine, sections: &[Section], answers: &AllAnswers) -> io::Result<()> {
    std::fs::write(dir.join("driver-behaviour.md"), render(&machine.to_string(), sections, answers))?;
    std::fs::write(dir.join("answers.txt"), every_answer(sections, answers))
}

/// Whether a simulator answered all as the GPU did. What broke was not asked to its end, so is never the same.
fn is_same(gpu: &Asked, simulated: &Asked) -> bool {
    gpu.broken.is_none()
        && simulated.broken.is_none()
        && gpu.answers.len() == simulated.answers.len()
        && gpu.answers.iter().zip(&simulated.answers).all(|(real, answer)| equals(&real.text, answer))
}

/// Answers as they stand in the table.
fn cell(asked: &Asked) -> String {
    let answers = asked.answers.iter().map(|answer| answer.text.as_str());
    let broken = asked.broken.as_ref().map(|_| "broken");
    answers.chain(broken).collect::<Vec<_>>().join(", ")
}

/// The answers of a GPU that a check expects, as they stand in the table.
pub fn expected_cell(check: &Check) -> String {
    let expected = check.lines.iter().filter_map(|line| line.expected.as_ref());
    expected.map(|expected| expected.measured.as_str()).collect::<Vec<_>>().join(", ")
}

/// What stands in the table for the GPU where a check was not asked.
pub fn not_asked_cell(check: &Check) -> String {
    let needs = check.needs.iter().map(|need| match need {
        Need::Devices(count) => format!("{count} devices"),
        Need::Numa => "NUMA memory".to_owned(),
        Need::Imex => "an IMEX channel".to_owned(),
    });
    format!("not asked: needs {}", needs.collect::<Vec<_>>().join(", "))
}

fn render(machine: &str, sections: &[Section], answers: &AllAnswers) -> String {
    let differ = |simulated: fn(&Answers) -> &Asked| {
        answers.values().filter(|answers| !is_same(&answers.gpu, simulated(answers))).count()
    };
    let mut text = String::new();
    let _ = writeln!(
        text,
        "# What drivers answer\n\n\
         `cargo xtask gpu-test --report DIR` writes this file; nobody edits it.\n\n\
         ```text\n{machine}\nchecks: {}\ndifferences to Measured: {}\ndifferences to Strict: {}\n```\n\n{NOTATION}",
        answers.len(),
        differ(|answers| &answers.measured),
        differ(|answers| &answers.strict),
    );
    for section in sections {
        let _ = writeln!(text, "## {}\n", section.name);
        let _ = writeln!(text, "| check | question | GPU | Measured | Strict |\n|---|---|---|---|---|");
        for check in &section.checks {
            let cells = match answers.get(&check.name) {
                Some(answers) => {
                    let simulated = |asked| if is_same(&answers.gpu, asked) { "=".to_owned() } else { cell(asked) };
                    [cell(&answers.gpu), simulated(&answers.measured), simulated(&answers.strict)]
                }
                None => [not_asked_cell(check), "-".to_owned(), "-".to_owned()],
            };
            let _ = writeln!(text, "| `{}` | {} | {} |", check.name, escaped(&check.question), cells.join(" | "));
        }
        let reasons = section.checks.iter().filter_map(|check| Some((check, check.strictness.as_ref()?)));
        let reasons: String = reasons.map(|(check, reason)| format!("- `{}`: {reason}\n", check.name)).collect();
        if !reasons.is_empty() {
            let _ = write!(text, "\nWhy `Strict` answers otherwise:\n\n{reasons}");
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Every line of every check with what each driver answered, and what the check says where a GPU says otherwise.
fn every_answer(sections: &[Section], answers: &AllAnswers) -> String {
    let mut text = String::new();
    for section in sections {
        for check in &section.checks {
            let _ = writeln!(text, "{}.checks: {}: {}", section.name, check.name, check.question);
            let Some(answers) = answers.get(&check.name) else {
                let _ = writeln!(text, "    {}", not_asked_cell(check));
                continue;
            };
            let asked = [("gpu", &answers.gpu), ("measured", &answers.measured), ("strict", &answers.strict)];
            let compared = check.lines.iter().filter(|line| line.expected.is_some());
            for (index, line) in compared.enumerate() {
                let said = asked.map(|(name, asked)| match asked.answers.get(index) {
                    Some(answer) if answer.violation => format!("{name} {} (undefined)", answer.text),
                    Some(answer) => format!("{name} {}", answer.text),
                    None => format!("{name} -"),
                });
                let written = line.expected.as_ref().map_or("", |expected| expected.measured.as_str());
                let is_as_written = answers.gpu.answers.get(index).is_some_and(|answer| equals(written, answer));
                let otherwise = if is_as_written { String::new() } else { format!(", but written {written}") };
                let said = said.join(" | ");
                let _ = writeln!(text, "    {:4}  {} -> {said}{otherwise}", line.number, line.text);
            }
            for (name, asked) in asked {
                if let Some(broken) = &asked.broken {
                    let _ = writeln!(text, "    {name} broken: {broken}");
                }
            }
        }
    }
    text
}

/// The rows of a report: the name of each check, and what the GPU answered.
pub fn rows(report: &str) -> Vec<(String, String)> {
    let rows = report.lines().filter_map(|line| {
        let line = line.strip_prefix("| `")?.replace("\\|", "");
        let cells: Vec<&str> = line.split(" | ").collect();
        let name = cells.first()?.strip_suffix('`')?;
        Some((name.to_owned(), (*cells.get(2)?).to_owned()))
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::parse::section;
    use super::super::run::Answer;
    use super::*;

    const TEXT: &str = "\
check one
ask \"a | b\"
    reserve 2M -> 0 3
    reserve 0 -> crash
check two
ask \"what else\"
strict \"it is dangerous\"
    reserve 0 -> 0 | 1
check three
ask \"with more\"
needs devices=2
    reserve 0 -> 1
";

    fn asked(answers: &[&str]) -> Asked {
        let answers = answers.iter().map(|answer| {
            let (text, violation) = answer.strip_suffix('!').map_or((*answer, false), |text| (text, true));
            Answer { text: text.to_owned(), violation }
        });
        Asked { answers: answers.collect(), broken: None }
    }

    #[test]
    fn a_report_counts_and_lists_differences() {
        let section = section("some", TEXT, &mut BTreeSet::new()).unwrap();
        let answers = AllAnswers::from([
            (
                "one".to_owned(),
                Answers {
                    gpu: asked(&["0 3", "crash"]),
                    measured: asked(&["0 3", "1!"]),
                    strict: asked(&["0 3", "1"]),
                },
            ),
            ("two".to_owned(), Answers { gpu: asked(&["0"]), measured: asked(&["0"]), strict: asked(&["1"]) }),
        ]);
        let sections = [section];
        let report = render("1 x H200", &sections, &answers);
        for expected in [
            "\n1 x H200\nchecks: 2\ndifferences to Measured: 0\ndifferences to Strict: 2\n",
            "\n| `one` | a \\| b | 0 3, crash | = | 0 3, 1 |\n",
            "\n| `two` | what else | 0 | = | 1 |\n",
            "\n| `three` | with more | not asked: needs 2 devices | - | - |\n",
            "\n- `two`: it is dangerous\n",
        ] {
            assert!(report.contains(expected), "{expected}\nis not in\n{report}");
        }
        let rows = rows(&report);
        let of_one = ("one".to_owned(), expected_cell(&sections[0].checks[0]));
        assert_eq!(rows[0], of_one);
        assert_eq!(rows[2], ("three".to_owned(), not_asked_cell(&sections[0].checks[2])));
        let log = every_answer(&sections, &answers);
        assert!(log.contains("reserve 0 -> gpu crash | measured 1 (undefined) | strict 1\n"), "{log}");
        let other = Answers { gpu: asked(&["1"]), measured: asked(&["0"]), strict: asked(&["1"]) };
        let log = every_answer(&sections, &AllAnswers::from([("two".to_owned(), other)]));
        assert!(log.contains("reserve 0 -> gpu 1 | measured 0 | strict 1, but written 0\n"), "{log}");
    }

    #[test]
    fn a_check_that_broke_is_different() {
        let whole = asked(&["0"]);
        let broken = Asked { broken: Some("line 3".into()), ..whole.clone() };
        assert!(is_same(&whole, &whole));
        assert!(!is_same(&whole, &broken) && !is_same(&broken, &whole) && !is_same(&broken, &broken));
        assert_eq!(cell(&broken), "0, broken");
    }
}
