//! What must not compile, and that it is for its own reason.

use crate::workspace::{assert_none, rust_files};

/// Where examples that must not compile stand, a file a crate.
const FILE: &str = "src/refused.rs";
/// What such an example begins with, before the codes of the error.
const REFUSED: &str = "compile_fail";

/// An example of the documentation.
struct Example {
    /// What stands behind its fence.
    kind: String,
    lines: Vec<String>,
}

/// The examples in a file's documentation.
fn examples(text: &str) -> Vec<Example> {
    let mut examples = Vec::new();
    let mut open: Option<Example> = None;
    for line in text.lines() {
        let line = line.trim_start();
        let Some(line) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else { continue };
        let line = line.trim();
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => examples.extend(open.take()),
            (Some(kind), None) => open = Some(Example { kind: kind.to_owned(), lines: Vec::new() }),
            (None, Some(example)) => example.lines.push(line.to_owned()),
            (None, None) => {}
        }
    }
    examples
}

/// Whether the one is the other with one line more, or one line other.
fn is_one_line_off(one: &[String], other: &[String]) -> bool {
    let same = one.iter().zip(other).take_while(|(one, other)| one == other).count();
    let behind = one.get(same + 1..);
    let (more, changed) = (other.get(same..), other.get(same + 1..));
    behind.is_some() && (behind == more || behind == changed)
}

/// The examples of a file that must not compile, and have no code or no twin that does.
fn alone(text: &str) -> Vec<String> {
    let examples = examples(text);
    let (refused, others): (Vec<_>, Vec<_>) = examples.iter().partition(|example| example.kind.starts_with(REFUSED));
    let is_proven = |example: &&&Example| {
        let code = example.kind.strip_prefix(REFUSED).and_then(|codes| codes.strip_prefix(",E"));
        let is_code = code.is_some_and(|code| code.len() == 4 && code.bytes().all(|digit| digit.is_ascii_digit()));
        let twin = others.iter().find(|other| other.kind.is_empty() && is_one_line_off(&example.lines, &other.lines));
        is_code && twin.is_some()
    };
    refused.iter().filter(|example| !is_proven(example)).map(|example| example.lines.join("\n    ")).collect()
}

#[test]
fn what_must_not_compile_has_a_twin_that_does() {
    let mut found = 0;
    let mut violations = Vec::new();
    for file in rust_files().filter(|file| file.path.starts_with("crates/")) {
        let refused = examples(&file.text).iter().filter(|example| example.kind.starts_with(REFUSED)).count();
        if file.path.ends_with(FILE) {
            found += refused;
            violations.extend(alone(&file.text).into_iter().map(|lines| format!("{}:\n    {lines}", file.path)));
        } else if refused > 0 {
            violations.push(format!("{}: such examples stand in {FILE}", file.path));
        }
    }
    assert!(found > 10, "{found} examples");
    assert_none("examples that must not compile without a code, or a twin one line off that does", &violations);
}

#[test]
fn an_example_that_may_fail_for_another_reason_is_caught() {
    let check = |fence: &str, refused: &[&str], twin: &[&str], expect: usize| {
        let lines = |lines: &[&str]| lines.iter().map(|line| format!("/// {line}\n")).collect::<String>();
        let text = format!("/// ```{fence}\n{}/// ```\n/// ```\n{}/// ```\n", lines(refused), lines(twin));
        assert_eq!(alone(&text).len(), expect, "{text}");
    };
    check("compile_fail,E0382", &["a", "b", "c"], &["a", "c"], 0);
    check("compile_fail,E0382", &["a", "b", "c"], &["a", "d", "c"], 0);
    check("compile_fail,E0382", &["a", "b"], &["a"], 0);
    check("compile_fail,E0382", &["a", "b", "c"], &["a", "b", "c"], 1);
    check("compile_fail,E0382", &["a", "b", "c"], &["a"], 1);
    check("compile_fail,E0382", &["a", "c"], &["a", "b", "c"], 1);
    check("compile_fail", &["a", "b"], &["a"], 1);
}
