//! `cargo xtask instructions`: count the instructions of each operation, under callgrind, and hold them to their budgets.
//!
//! Counts are the same whatever else the machine does, and differ a little by compiler and C library: budgets have a tenth or
//! so to spare. One that is twice what was counted is refused, too: nothing would be noticed under it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use crate::gpu_test;

const BUDGETS: &str = "tests/benches/instructions/budgets.json";
const BENCH: &str = "instructions";
/// The function whose calls are counted.
const COUNTED: &str = "counted_by_callgrind";
const FOLDER: &str = "target/instructions";

/// What was counted of one operation, each time.
pub(crate) type Counts = (String, Vec<u64>);

/// Counts, and refuses what is over its budget, or so far below that the budget is stale.
pub(crate) fn run(sh: &Shell) -> Result<()> {
    let budgets = budgets(&sh.read_file(BUDGETS)?)?;
    let counts = count(sh)?;
    println!("{:<26} {:>12} {:>12}", "operation", "instructions", "budget");
    for (name, times) in &counts {
        let budget = budgets.get(name).map_or("none".into(), u64::to_string);
        println!("{name:<26} {:>12} {budget:>12}", middle(times));
    }
    let wrong = judge(&counts, &budgets);
    ensure!(wrong.is_empty(), "{BUDGETS} is not kept:\n{}", wrong.join("\n"));
    Ok(())
}

/// Counts the instructions of each operation, several times.
pub(crate) fn count(sh: &Shell) -> Result<Vec<Counts>> {
    require_valgrind(sh)?;
    let program = build(sh)?;
    let out = sh.create_dir(sh.current_dir().join(FOLDER))?.join("callgrind.out");
    sh.remove_path(&out)?;
    let names = callgrind(sh, &program, &out)?;
    counts(&names, &sh.read_file(&out)?)
}

fn callgrind(sh: &Shell, program: &Path, out: &Path) -> Result<String> {
    let options = [format!("--toggle-collect={COUNTED}"), format!("--dump-after={COUNTED}")];
    // All in one file, a part each time.
    let files = ["--combine-dumps=yes".to_owned(), format!("--callgrind-out-file={}", out.display())];
    let said = cmd!(sh, "valgrind --quiet --tool=callgrind {options...} {files...} {program}").quiet().read();
    said.context("the program failed under callgrind")
}

fn build(sh: &Shell) -> Result<PathBuf> {
    let json = ["--locked", "--message-format=json-render-diagnostics"];
    let messages = cmd!(sh, "cargo bench --package cuvmm-tests --bench {BENCH} --no-run {json...}").read()?;
    let program = gpu_test::artifacts(&messages)?.into_iter().find(|artifact| artifact.name == BENCH);
    Ok(program.with_context(|| format!("cargo built no benchmark `{BENCH}`"))?.path)
}

/// Takes the valgrind that is there, and installs it where there is none and that may be done.
fn require_valgrind(sh: &Shell) -> Result<()> {
    let is_there = || cmd!(sh, "valgrind --version").quiet().ignore_stdout().ignore_stderr().run().is_ok();
    if is_there() {
        return Ok(());
    }
    println!("valgrind is not here: installing the distribution's");
    let install = || -> Result<()> {
        let id = cmd!(sh, "id -u").quiet().read()?;
        ensure!(id == "0", "only root may do that");
        cmd!(sh, "apt-get update").quiet().ignore_stdout().run()?;
        cmd!(sh, "apt-get install --yes --no-install-recommends valgrind").quiet().ignore_stdout().run()?;
        ensure!(is_there(), "it is installed, and does not start");
        Ok(())
    };
    install().context(
        "valgrind, which counts instructions, cannot be installed: install it (on Debian: apt-get install valgrind)",
    )
}

fn budgets(text: &str) -> Result<BTreeMap<String, u64>> {
    serde_json::from_str(text).with_context(|| format!("{BUDGETS} is no list of budgets"))
}

/// What the program printed before each count, and the sum of each part that callgrind wrote, in the same order; the last
/// part, at the end of the program, is of nothing.
fn counts(names: &str, parts: &str) -> Result<Vec<Counts>> {
    let sums = parts.lines().filter_map(|line| line.strip_prefix("totals: "));
    let sums: Vec<u64> = sums.map(|sum| sum.trim().parse()).collect::<Result<_, _>>().context("a sum is no number")?;
    let names: Vec<&str> = names.lines().collect();
    ensure!(sums.len() == names.len() + 1, "callgrind wrote {} parts of {} counts", sums.len(), names.len());
    ensure!(sums.last() == Some(&0), "callgrind counted something else, too");
    let mut counts: Vec<Counts> = Vec::new();
    for (name, sum) in names.into_iter().zip(sums) {
        match counts.last_mut() {
            Some((last, sums)) if last == name => sums.push(sum),
            _ => counts.push((name.to_owned(), vec![sum])),
        }
    }
    Ok(counts)
}

/// The middle one.
pub(crate) fn middle(counts: &[u64]) -> u64 {
    let mut sorted = counts.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// Each that is over its budget or far below it, that has none, or that has one and was not counted.
fn judge(counts: &[Counts], budgets: &BTreeMap<String, u64>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, times) in counts {
        let count = middle(times);
        match budgets.get(name) {
            None => wrong.push(format!("{name}: {count} instructions, and no budget")),
            Some(budget) if count > *budget => {
                wrong.push(format!("{name}: {count} instructions, {} over its budget of {budget}", count - budget));
            }
            Some(budget) if count * 2 < *budget => {
                wrong.push(format!(
                    "{name}: {count} instructions, less than half of its budget of {budget}: lower that"
                ));
            }
            Some(_) => {}
        }
    }
    let is_counted = |name: &String| counts.iter().any(|(counted, _)| counted == name);
    wrong.extend(budgets.keys().filter(|name| !is_counted(name)).map(|name| format!("{name}: not counted")));
    wrong
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What has a budget.
    pub(crate) fn budgeted() -> Vec<String> {
        budgets(include_str!("../../tests/benches/instructions/budgets.json")).unwrap().into_keys().collect()
    }

    #[test]
    fn what_is_printed_and_what_is_written_belong_together() {
        let part = |sum: u64| format!("part: 1\nfn=(1) f\n3 {sum}\ntotals: {sum}\n");
        let parts = [7, 9, 8, 100, 0].map(part).concat();
        let counted = counts("a\na\na\nb\n", &parts).unwrap();
        assert_eq!(counted, [("a".to_owned(), vec![7, 9, 8]), ("b".to_owned(), vec![100])]);
        assert_eq!(middle(&counted[0].1), 8);
        assert!(counts("a\na\na\n", &parts).is_err());
        assert!(counts("a\n", &[7, 1].map(part).concat()).is_err());
    }

    #[test]
    fn budgets_are_held_and_stale_ones_told() {
        let budgets = budgets(r#"{"a": 100, "b": 100}"#).unwrap();
        let check = |counts: &[(&str, u64)], expect: &[&str]| {
            let counts: Vec<Counts> = counts.iter().map(|(name, count)| ((*name).to_owned(), vec![*count])).collect();
            assert_eq!(judge(&counts, &budgets), expect);
        };
        check(&[("a", 100), ("b", 50)], &[]);
        check(&[("a", 101), ("b", 60)], &["a: 101 instructions, 1 over its budget of 100"]);
        check(&[("a", 49), ("b", 60)], &["a: 49 instructions, less than half of its budget of 100: lower that"]);
        check(&[("a", 60), ("c", 60)], &["c: 60 instructions, and no budget", "b: not counted"]);
    }
}
