//! The conformance suite: what drivers answer, as the files of `tests/conformance` have it.
//!
//! `cargo xtask gpu-test` asks a GPU, `cargo test` the simulators, each of which must answer as written.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm_tests::conformance::{self, Asked, Check, Driver};

/// How many checks there are at least: about as many as there were. Raise it when many come.
const LEAST: usize = 760;

macro_rules! declare {
    ($($section:ident)*) => {
        mod measured {
            $(
                #[test]
                fn $section() {
                    super::require_as_written(super::Driver::Measured, stringify!($section), concat!("measured::", stringify!($section)));
                }
            )*
        }

        mod strict {
            $(
                #[test]
                fn $section() {
                    super::require_as_written(super::Driver::Strict, stringify!($section), concat!("strict::", stringify!($section)));
                }
            )*
        }
    };
}

cuvmm_tests::for_each_section!(declare);

mod gpu {
    use std::path::Path;

    use cuvmm_tests::Machine;
    use cuvmm_tests::conformance::{AllAnswers, Answers};

    use super::{Asked, Check, Driver, conformance, require_none_different};

    const TEST: &str = "gpu::answers_are_as_written";

    #[test]
    #[ignore = "needs a GPU: cargo xtask gpu-test"]
    fn answers_are_as_written() {
        conformance::play_part();
        let sections = conformance::sections().unwrap();
        let system = cuvmm::Driver::load().expect("a driver on this machine");
        let checks = sections.iter().flat_map(|section| &section.checks);
        let checks: Vec<_> = checks.filter(|check| conformance::can_ask(&system, check)).collect();
        assert!(!checks.is_empty(), "nothing to ask");
        let asked = conformance::ask_all(Driver::Gpu, &checks, TEST);
        if let Some(dir) = std::env::var_os(conformance::REPORT) {
            let answers = beside_simulators(&checks, &asked);
            let machine = Machine::this().unwrap();
            conformance::write_report(Path::new(&dir), &machine, &sections, &answers).expect("a report");
        }
        require_none_different(Driver::Gpu, &checks, &asked);
    }

    /// What a GPU was asked, with what the simulators answer.
    fn beside_simulators(checks: &[&Check], gpu: &[Asked]) -> AllAnswers {
        let measured = conformance::ask_all(Driver::Measured, checks, TEST);
        let strict = conformance::ask_all(Driver::Strict, checks, TEST);
        let simulated = measured.into_iter().zip(strict);
        let rows = checks.iter().zip(gpu).zip(simulated);
        rows.map(|((check, gpu), (measured, strict))| {
            (check.name.clone(), Answers { gpu: gpu.clone(), measured, strict })
        })
        .collect()
    }
}

/// What `gpu` leaves out on a machine with one GPU, so that it is counted there as skipped.
mod gpu_x2 {
    use super::{Check, Driver, conformance, require_none_different};

    #[test]
    #[ignore = "needs two GPUs: cargo xtask gpu-test"]
    fn answers_about_two_devices_are_as_written() {
        conformance::play_part();
        let sections = conformance::sections().unwrap();
        let checks = sections.iter().flat_map(|section| &section.checks);
        let checks: Vec<&Check> = checks.filter(|check| check.devices() > 1).collect();
        assert!(!checks.is_empty(), "nothing to ask");
        let test = "gpu_x2::answers_about_two_devices_are_as_written";
        require_none_different(Driver::Gpu, &checks, &conformance::ask_all(Driver::Gpu, &checks, test));
    }
}

#[test]
fn every_file_is_a_section() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/conformance");
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<String> = names.filter_map(|name| name.strip_suffix(".checks").map(str::to_owned)).collect();
    let mut sections: Vec<String> =
        conformance::sections().unwrap().into_iter().map(|section| section.name.to_owned()).collect();
    files.sort_unstable();
    sections.sort_unstable();
    assert_eq!(files, sections);
}

#[test]
fn no_less_is_asked_than_was_once() {
    let checks: usize = conformance::sections().unwrap().iter().map(|section| section.checks.len()).sum();
    assert!(checks >= LEAST, "{checks} checks, {LEAST} at least");
}

#[test]
fn the_documented_answers_are_those_of_the_checks() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/driver-behaviour.md");
    let report = std::fs::read_to_string(path).expect("docs/driver-behaviour.md, from gpu-test --report");
    let sections = conformance::sections().unwrap();
    let checks: Vec<&Check> = sections.iter().flat_map(|section| &section.checks).collect();
    let rows = conformance::rows(&report);
    let (documented, asked): (Vec<_>, Vec<_>) = (
        rows.iter().map(|(name, _)| name.as_str()).collect(),
        checks.iter().map(|check| check.name.as_str()).collect(),
    );
    assert_eq!(documented, asked, "run gpu-test --report again");
    for (check, (name, answers)) in checks.iter().zip(&rows) {
        let was_not_asked = !check.needs.is_empty() && *answers == conformance::not_asked_cell(check);
        assert!(was_not_asked || *answers == conformance::expected_cell(check), "{name}: a GPU answered {answers}");
    }
}

/// Demands that no check was answered otherwise than written.
fn require_none_different(driver: Driver, checks: &[&Check], asked: &[Asked]) {
    let pairs = checks.iter().zip(asked);
    let different: Vec<String> =
        pairs.filter_map(|(check, asked)| conformance::difference(driver, check, asked)).collect();
    let (found, all) = (different.len(), checks.len());
    assert!(different.is_empty(), "{found} of {all} checks differ:\n\n{}", different.join("\n"));
}

/// Demands that a simulator answers the checks of a section as they are written.
fn require_as_written(driver: Driver, section: &str, test: &str) {
    conformance::play_part();
    let sections = conformance::sections().unwrap();
    let section = sections.iter().find(|found| found.name == section).expect("a section");
    assert!(!section.checks.is_empty(), "a section without checks");
    let checks: Vec<&Check> = section.checks.iter().collect();
    require_none_different(driver, &checks, &conformance::ask_all(driver, &checks, test));
}
