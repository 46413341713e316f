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
const CAPTURE_CALLS: &[&str] =
    &["stream_synchronize", "event_synchronize", "stream_query", "event_query", "event_record", "stream_is_capturing"];
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
