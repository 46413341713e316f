//! How the files of the workspace are written.

use std::fs;

use crate::workspace::{File, assert_none, files, packages, rust_files};

/// The lines that a file may have, and those that it may have with a reason.
const LINES: usize = 500;
const LINES_ARGUED: usize = 800;

/// Files of more than [`LINES`] lines, each with its reason.
const LONG: &[(&str, &str)] = &[];

/// Words that tell when something was delivered, not what it is.
const DELIVERY_WORDS: &[&str] = &["wave", "phase", "v2"];

/// Calls that can kill a capture of another thread, unless they are made as capture.rs makes them.
const CAPTURE_CALLS: &[&str] = &[
    "stream_synchronize",
    "event_synchronize",
    "stream_query",
    "event_query",
    "event_record",
    "stream_is_capturing",
    "stream_get_capture_info",
];
const CAPTURE_FILE: &str = "crates/cuvmm-resource/src/capture.rs";
const CAPTURE_FOLDERS: &[&str] =
    &["crates/cuvmm-handles/src/", "crates/cuvmm-resource/src/", "crates/cuvmm-ipc/src/", "crates/cuvmm/src/"];

#[test]
fn rust_files_say_what_they_are() {
    // A crate root may show the crate's README instead.
    let openings = ["//! ", "#![doc = include_str!("];
    let silent = rust_files().filter(|file| !openings.iter().any(|opening| file.text.starts_with(opening)));
    let silent: Vec<String> = silent.map(|file| file.path).collect();
    assert_none("files that do not open with `//!`", &silent);
}

#[test]
fn rust_files_are_short() {
    let lengths: Vec<(String, usize)> = rust_files().map(|file| (file.path, file.text.lines().count())).collect();
    let mut violations = too_long(&lengths, LONG);
    for (path, _) in LONG {
        if !lengths.iter().any(|(file, lines)| file == path && *lines > LINES) {
            violations.push(format!("{path}: needs no exception (any more)"));
        }
    }
    assert_none("files to split, or to argue for in LONG", &violations);
}

fn too_long(lengths: &[(String, usize)], argued: &[(&str, &str)]) -> Vec<String> {
    let limit = |path: &str| {
        let is_argued = argued.iter().any(|(file, _)| *file == path);
        if is_argued { LINES_ARGUED } else { LINES }
    };
    lengths
        .iter()
        .filter(|(path, lines)| *lines > limit(path))
        .map(|(path, lines)| format!("{path}: {lines} lines, {} at most", limit(path)))
        .collect()
}

#[test]
fn long_files_are_caught() {
    let check = |lines: usize, argued: &[(&str, &str)], expect: &[&str]| {
        assert_eq!(too_long(&[("a.rs".into(), lines)], argued), expect, "{lines} lines");
    };
    let argued = &[("a.rs", "one list")];
    check(500, &[], &[]);
    check(501, &[], &["a.rs: 501 lines, 500 at most"]);
    check(501, argued, &[]);
    check(801, argued, &["a.rs: 801 lines, 800 at most"]);
}

#[test]
fn files_are_named_by_subject() {
    let named = files().into_iter().filter(|file| has_delivery_word(&file.path));
    let named: Vec<String> = named.map(|file| file.path).collect();
    assert_none("file names with a word of delivery", &named);
}

/// Whether a word of the path is one of [`DELIVERY_WORDS`], numbered or not.
fn has_delivery_word(path: &str) -> bool {
    path.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| {
        let word = word.to_ascii_lowercase();
        let unnumbered = word.trim_end_matches(|c: char| c.is_ascii_digit());
        DELIVERY_WORDS.contains(&word.as_str()) || DELIVERY_WORDS.contains(&unnumbered)
    })
}

#[test]
fn delivery_words_are_caught() {
    let check = |path: &str, expect: bool| assert_eq!(has_delivery_word(path), expect, "{path}");
    check("tests/wave1_smoke.rs", true);
    check("docs/Phase-2.md", true);
    check("src/api_v2.rs", true);
    check("src/phased.rs", false);
    check("src/microwave.rs", false);
}

#[test]
fn names_and_headings_are_by_subject() {
    // This file has the words to look for.
    let others = files().into_iter().filter(|file| !file.path.ends_with("invariants/sources.rs"));
    let named: Vec<String> = others
        .flat_map(|file| {
            let lines = delivery_lines(&file).into_iter();
            lines.map(|line| format!("{}:{line}", file.path)).collect::<Vec<_>>()
        })
        .collect();
    assert_none("identifiers or headings with a word of delivery", &named);
}

/// The numbers of the lines of code, or of the headings of a document, that have a word of [`DELIVERY_WORDS`]. The
/// driver's own names end with versions.
fn delivery_lines(file: &File) -> Vec<usize> {
    let (is_code, is_document) = (file.path.ends_with(".rs"), file.path.ends_with(".md"));
    let told = |line: &&str| {
        let (code, comment) = line.split_once("//").unwrap_or((line, ""));
        let is_heading = |text: &str| text.trim_start_matches(['/', '!', ' ']).starts_with('#');
        if is_code {
            has_delivery_word(&words(code)) || (is_heading(comment) && has_delivery_word(comment))
        } else {
            is_document && is_heading(line) && has_delivery_word(line)
        }
    };
    (1..).zip(file.text.lines()).filter(|(_, line)| told(line)).map(|(number, _)| number).collect()
}

/// The words of the identifiers in a line, without versions.
fn words(code: &str) -> String {
    let mut words = String::new();
    for (before, c) in std::iter::once(' ').chain(code.chars()).zip(code.chars()) {
        if c.is_ascii_uppercase() && !before.is_ascii_uppercase() {
            words.push(' ');
        }
        words.push(c);
    }
    words.replace("_v2", "")
}

#[test]
fn delivery_names_are_caught() {
    let check = |path: &str, text: &str, expect: &[usize]| {
        let file = File { path: path.into(), text: text.into() };
        assert_eq!(delivery_lines(&file), expect, "{text}");
    };
    check("a.rs", "struct S;\nfn wave2_smoke() {}\nstruct FirstPhase;\nconst PHASE: u8 = 1;", &[2, 3, 4]);
    check("a.rs", "// a wave of light\n/// # Phase 1\nfn microwave(phased: bool) { cuMemFree_v2() }", &[2]);
    check("a.md", "# The wave\nIt has a phase.\n## Heading", &[1]);
    check("a.toml", "phase = 1", &[]);
}

#[test]
fn the_commands_of_the_readme_exist() {
    let files = files();
    let text = |path: &str| files.iter().find(|file| file.path == path).map(|file| file.text.as_str()).unwrap();
    let commands: Vec<&str> = text("README.md").lines().filter_map(|line| line.strip_prefix("$ ")).collect();
    let commands: Vec<&str> = commands.iter().map(|line| line.split('#').next().unwrap_or(line).trim()).collect();
    let [demo, test] = commands[..] else { panic!("README.md has not two commands: {commands:?}") };
    assert_eq!(test, "cargo test --workspace");
    assert!(text("xtask/src/ci.rs").contains(test), "`cargo xtask ci` does not run `{test}`");

    let (build, arguments) = demo.split_once(" -- ").unwrap();
    let package = build.strip_prefix("cargo run --release -p ").unwrap_or_else(|| panic!("{demo}"));
    let packages = packages();
    let package = packages.iter().find(|found| found["name"] == package).unwrap_or_else(|| panic!("no {package}"));
    let targets = package["targets"].as_array().unwrap();
    let programs = targets.iter().filter(|target| target["kind"][0] == "bin").count();
    assert_eq!(programs, 1, "`{build}` runs the only program of its package");
    let cli = files.iter().filter(|file| file.path.starts_with("crates/cuvmm-cli/src/"));
    let verb = format!("cmd {arguments} ");
    assert!(cli.into_iter().any(|file| file.text.contains(&verb)), "the command has no `{arguments}`");
}

#[test]
fn captures_are_asked_in_one_place() {
    let guarded =
        |file: &File| file.path != CAPTURE_FILE && CAPTURE_FOLDERS.iter().any(|dir| file.path.starts_with(dir));
    let violations: Vec<String> = rust_files()
        .filter(guarded)
        .flat_map(|file| {
            let calls = capture_calls(&file.text).into_iter();
            calls.map(|call| format!("{}:{call}", file.path)).collect::<Vec<_>>()
        })
        .collect();
    assert_none("calls that only capture.rs may make", &violations);
}

/// The guarded calls in a source text, as `LINE: NAME`; comments are passed over.
fn capture_calls(text: &str) -> Vec<String> {
    let mut calls = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let code = line.split_once("//").map_or(line, |(code, _)| code);
        let words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let guarded = words.filter(|word| CAPTURE_CALLS.contains(word));
        calls.extend(guarded.map(|name| format!("{number}: {name}")));
    }
    calls
}

#[test]
fn capture_calls_are_caught() {
    let text = "driver.stream_query(s)?;\n// stream_query(s)\nlet f = Driver::event_record;\n\
                my_stream_query();\n";
    assert_eq!(capture_calls(text), ["1: stream_query", "3: event_record"]);
}

/// A typed call is refused in a forked child where it takes the driver's calls from: a raw one would not be.
#[test]
fn typed_calls_are_refused_in_a_forked_child() {
    let folders = CAPTURE_FOLDERS.iter().chain(&["crates/cuvmm-driver/src/"]);
    let ours = |file: &File| folders.clone().any(|folder| file.path.starts_with(folder));
    let raw: Vec<String> =
        rust_files().filter(ours).filter(|file| makes_raw_call(&file.text)).map(|file| file.path).collect();
    assert_none("files that call `.raw()` and not `.calls()?`", &raw);
}

fn makes_raw_call(text: &str) -> bool {
    let code = text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    code.flat_map(str::split_whitespace).collect::<String>().contains(".raw().cu")
}

#[test]
fn raw_calls_are_caught() {
    let check = |text: &str, expect: bool| assert_eq!(makes_raw_call(text), expect, "{text}");
    check("unsafe { self.raw().cuInit(0) }", true);
    check("driver\n    .raw()\n    .cuInit(0)", true);
    check("driver.calls()?.cuInit(0) // not driver.raw().cuInit(0)", false);
    check("driver.raw().provides(call)", false);
}

#[test]
fn no_file_names_a_place_of_one_machine() {
    // Put together here, so that this file does not hold them.
    let places = [["/wo", "rk/"].concat(), ["/ro", "ot/"].concat()];
    let violations: Vec<String> = files()
        .into_iter()
        .filter(|file| places.iter().any(|place| file.text.contains(place)))
        .map(|file| file.path)
        .collect();
    assert_none("files with a path of one machine", &violations);
}

#[test]
fn every_package_inherits_the_lints() {
    let violations: Vec<String> = files()
        .into_iter()
        .filter(|file| file.path.ends_with("/Cargo.toml"))
        .filter(|file| !file.text.contains("[lints]\nworkspace = true\n"))
        .map(|file| file.path)
        .collect();
    assert_none("packages without `[lints] workspace = true`", &violations);
}

#[test]
fn every_crate_root_denies_unsafe_code() {
    let mut violations = Vec::new();
    for package in packages() {
        for target in package["targets"].as_array().unwrap() {
            let path = target["src_path"].as_str().unwrap();
            let kind = target["kind"][0].as_str().unwrap();
            if !["lib", "bin", "cdylib"].contains(&kind) {
                continue;
            }
            let text = fs::read_to_string(path).unwrap();
            let denies = ["#![deny(unsafe_code)]", "#![forbid(unsafe_code)]"];
            if !denies.iter().any(|line| text.contains(line)) {
                violations.push(path.to_owned());
            }
        }
    }
    assert_none("crate roots without `#![deny(unsafe_code)]` or `forbid`", &violations);
}

#[test]
fn files_with_unsafe_code_open_with_their_safety() {
    // Put together here, so that this file does not hold it.
    let allow = ["#![allow(", "unsafe_code"].concat();
    let violations: Vec<String> = rust_files()
        .filter(|file| file.text.contains(&allow))
        .filter(|file| {
            let mut header = file.text.lines().take_while(|line| line.starts_with("//!"));
            !header.any(|line| line == "//! # Safety")
        })
        .map(|file| file.path)
        .collect();
    assert_none("files that allow unsafe code without `//! # Safety` at their top", &violations);
}
