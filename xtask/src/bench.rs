//! `cargo xtask bench`: measure what buffers cost, and write it down.
//!
//! ```text
//! docs/benchmarks.json      the rows: what was measured, of every run that was kept
//! docs/benchmarks.md        the same for people, with what must hold; nobody writes there but this
//! docs/benchmarks/NAME.svg  its plots
//! target/bench              what the benchmarks leave
//! ```

mod drawn;
mod judged;
mod measured;
mod page;
mod rows;

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use crate::{flags, instructions};
use rows::Row;

const JSON: &str = "docs/benchmarks.json";
const PAGE: &str = "docs/benchmarks.md";
const PLOTS: &str = "docs/benchmarks";
const FOLDER: &str = "target/bench";
/// Names the driver, as the benchmarks themselves read it.
const DRIVER: &str = "CUVMM_DRIVER";

/// Measures here, or takes the rows of the files that are named; then writes rows, page and plots.
pub(crate) fn run(sh: &Shell, options: &flags::Bench, caller: &Path) -> Result<()> {
    ensure!(options.from || options.file.is_empty(), "files are read with --from alone");
    ensure!(!options.from || !(options.own || options.file.is_empty()), "--from wants files, and measures nothing");
    let mut rows = kept(sh)?;
    if options.from {
        for file in &options.file {
            rows = rows::merge(rows, taken(&caller.join(file))?);
        }
    } else {
        rows = rows::merge(rows, own_times(sh)?);
        rows = rows::merge(rows, measured::instructions(&instructions::count(sh)?));
        if !options.own {
            rows = rows::merge(rows, beside_raw_calls(sh)?);
        }
    }
    rows::check(&rows)?;
    let files = files(&rows)?;
    sh.write_file(JSON, rows::to_json(&rows)?)?;
    // Of rows that are gone there is no plot.
    sh.remove_path(PLOTS)?;
    for (path, text) in files {
        sh.write_file(path, text)?;
    }
    println!("{JSON}, {PAGE} and the plots in {PLOTS} are written");
    for row in rows::missing(&rows, rows::numbers_of_gpus(&rows)) {
        println!("not there: {row}");
    }
    Ok(())
}

/// What a run elsewhere left: a list of rows, or the folder of criterion's.
fn taken(from: &Path) -> Result<Vec<Row>> {
    if from.is_dir() {
        return measured::times(from);
    }
    let text = fs::read_to_string(from).with_context(|| format!("cannot read {}", from.display()))?;
    rows::parse(&text).with_context(|| format!("{} is not what a run writes", from.display()))
}

/// The rows that there are.
fn kept(sh: &Shell) -> Result<Vec<Row>> {
    if !sh.path_exists(JSON) {
        return Ok(Vec::new());
    }
    rows::parse(&sh.read_file(JSON)?).with_context(|| format!("{JSON} is not a list of rows"))
}

/// What is generated from rows: files, and what is in them.
fn files(rows: &[Row]) -> Result<Vec<(PathBuf, String)>> {
    let plots = drawn::all(rows)?;
    let names: Vec<&str> = plots.iter().map(|(name, _)| name.as_str()).collect();
    let page = (PathBuf::from(PAGE), page::write(rows, &names));
    let plots = plots.into_iter().map(|(name, drawing)| (Path::new(PLOTS).join(format!("{name}.svg")), drawing));
    Ok([page].into_iter().chain(plots).collect())
}

/// How long our own part takes.
fn own_times(sh: &Shell) -> Result<Vec<Row>> {
    let folder = sh.current_dir().join(FOLDER).join("criterion");
    // What is left of a benchmark that is gone would be read, too.
    sh.remove_path(&folder)?;
    cmd!(sh, "cargo bench --package cuvmm-tests --bench own_cost --locked").env("CRITERION_HOME", &folder).run()?;
    measured::times(&folder)
}

/// What operations take beside the driver's calls alone. What a simulator says of that is shown, and kept nowhere.
fn beside_raw_calls(sh: &Shell) -> Result<Vec<Row>> {
    let json = sh.create_dir(sh.current_dir().join(FOLDER))?.join("costs.json");
    cmd!(sh, "cargo bench --package cuvmm-tests --bench costs --locked -- --json {json}").run()?;
    if env::var_os(DRIVER).is_some() {
        return rows::parse(&sh.read_file(json)?);
    }
    println!("these are a simulator's, which say nothing of a GPU: {DRIVER}=cuda measures on one");
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn read(path: impl AsRef<Path>) -> String {
        let root = crate::workspace_root().unwrap();
        let path = root.join(path);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    #[test]
    fn the_page_and_its_plots_are_what_the_rows_say() {
        let rows = rows::parse(&read(JSON)).unwrap();
        assert!(rows::to_json(&rows).unwrap() == read(JSON), "{JSON} is not as `cargo xtask bench` writes it");
        let files = files(&rows).unwrap();
        for (path, text) in &files {
            assert!(*text == read(path), "{} is stale: `cargo xtask bench` writes it", path.display());
        }
        let folder = crate::workspace_root().unwrap().join(PLOTS);
        for entry in fs::read_dir(folder).unwrap() {
            let name = Path::new(PLOTS).join(entry.unwrap().file_name());
            assert!(files.iter().any(|(path, _)| *path == name), "{} belongs to no row", name.display());
        }
    }

    #[test]
    fn the_rows_are_sound_and_none_is_missing_of_a_host_with_one_gpu_or_two() {
        let rows = rows::parse(&read(JSON)).unwrap();
        rows::check(&rows).unwrap();
        assert_eq!(rows::missing(&rows, [1, 2]), [""; 0]);
        let counted = rows.iter().filter(|row| row.unit == rows::INSTRUCTIONS).map(|row| row.case.clone());
        assert_eq!(counted.collect::<BTreeSet<_>>(), BTreeSet::from_iter(instructions::tests::budgeted()));
    }
}
